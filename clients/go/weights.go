package penstock

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"penstock/clients/go/penstockv1"
)

const (
	// mostChunkBytes is the most that is sent at once. A server may take more, but that would only cost memory.
	mostChunkBytes = 8 << 20
	// chunkOverheadBytes is what a chunk's message has besides the tensor's bytes, at most.
	chunkOverheadBytes = 64
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// UpdateWeights replaces the weights that serve by those of a safetensors file, or of a folder of them, without a
// restart. What becomes of running requests, whether other tensors may be missing and so on is in begin, whose source
// must be unset and which needs a version_label.
//
// The server first checks the manifest, with the CRC32C of every tensor, and then takes the bytes in chunks, of which
// no more than one is in memory here. A call that ends with an error before the commit has changed nothing.
//
// An update is applied once for each update_id, so a call that failed may be made again with the same one: it answers
// UPDATE_OUTCOME_ALREADY_COMMITTED if it had been applied. Without an update_id a new one is made, which [Error] has.
//
// A client of several servers (dns:///) cannot update them, because they would no longer serve the same: make a client
// for each.
func (c *Client) UpdateWeights(
	ctx context.Context, begin *penstockv1.UpdateWeightsBegin, path string, options ...grpc.CallOption,
) (*penstockv1.UpdateWeightsResponse, error) {
	found, err := OpenSafetensors(path)
	if err != nil {
		return nil, fmt.Errorf("penstock: %w", err)
	}
	defer func() { _ = found.Close() }() // they were only read
	return c.UpdateWeightsFromTensors(ctx, begin, found.Tensors, options...)
}

// UpdateWeightsFromTensors is [Client.UpdateWeights] with tensors that are in memory, or anywhere.
func (c *Client) UpdateWeightsFromTensors(
	ctx context.Context, begin *penstockv1.UpdateWeightsBegin, tensors []Tensor, options ...grpc.CallOption,
) (*penstockv1.UpdateWeightsResponse, error) {
	begin, err := begun(begin)
	if err != nil {
		return nil, err
	}
	manifest, err := manifestOf(ctx, tensors, !begin.ValidateOnly)
	if err != nil {
		return nil, err
	}
	begin.Source = &penstockv1.UpdateWeightsBegin_Manifest{Manifest: manifest}
	if begin.ValidateOnly {
		tensors = nil
	}
	return c.update(ctx, begin, tensors, options)
}

// UpdateWeightsFromURI is [Client.UpdateWeights] with files that the server reads itself: file:// and a path as the
// server sees it, below a folder that its operator allows (--weights-root).
func (c *Client) UpdateWeightsFromURI(
	ctx context.Context, begin *penstockv1.UpdateWeightsBegin, uri string, options ...grpc.CallOption,
) (*penstockv1.UpdateWeightsResponse, error) {
	begin, err := begun(begin)
	if err != nil {
		return nil, err
	}
	begin.Source = &penstockv1.UpdateWeightsBegin_Uri{Uri: uri}
	return c.update(ctx, begin, nil, options)
}

// begun copies the caller's message, and gives it an id if it has none.
func begun(begin *penstockv1.UpdateWeightsBegin) (*penstockv1.UpdateWeightsBegin, error) {
	if begin.GetSource() != nil {
		return nil, errors.New("penstock: begin.source must be unset: the method fills it in")
	}
	found := &penstockv1.UpdateWeightsBegin{}
	if begin != nil {
		proto.Merge(found, begin)
	}
	if found.UpdateId == "" {
		var id [16]byte
		_, _ = rand.Read(id[:]) // never fails, by its documentation
		found.UpdateId = hex.EncodeToString(id[:])
	}
	return found, nil
}

func manifestOf(ctx context.Context, tensors []Tensor, checksums bool) (*penstockv1.TensorManifest, error) {
	manifest := &penstockv1.TensorManifest{}
	for _, tensor := range tensors {
		spec := &penstockv1.TensorSpec{Name: tensor.Name, Dtype: tensor.DType, Shape: tensor.Shape}
		if checksums {
			err := pieces(ctx, tensor, 1<<20, func(_ uint64, data []byte) error {
				spec.Crc32C = crc32.Update(spec.Crc32C, castagnoli, data)
				return nil
			})
			if err != nil {
				return nil, err
			}
		}
		manifest.Tensors = append(manifest.Tensors, spec)
	}
	return manifest, nil
}

// update sends one update. If it cannot, it leaves the stream without a commit, so the server changes nothing.
func (c *Client) update(
	ctx context.Context, begin *penstockv1.UpdateWeightsBegin, tensors []Tensor, options []grpc.CallOption,
) (*penstockv1.UpdateWeightsResponse, error) {
	if c.balanced {
		return nil, errors.New("penstock: this client calls several servers in turn; to update them, make a client for each")
	}
	chunkBytes := min(mostChunkBytes, c.chunkRoom)
	if len(tensors) > 0 {
		info, err := c.Control.GetServerInfo(ctx, &penstockv1.GetServerInfoRequest{})
		if err != nil {
			return nil, ofUpdate(err, begin.UpdateId)
		}
		// It is 0 for a server that takes no updates, which says so itself when one begins.
		if info.MaxChunkBytes > 0 {
			chunkBytes = min(chunkBytes, int(info.MaxChunkBytes))
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Inference.UpdateWeights(ctx, options...)
	if err != nil {
		return nil, ofUpdate(err, begin.UpdateId)
	}
	err = sendUpdate(ctx, stream, begin, tensors, chunkBytes)
	if err != nil && err != io.EOF { // io.EOF: the server has answered already, and the answer says why
		return nil, ofUpdate(err, begin.UpdateId)
	}
	reply, err := stream.CloseAndRecv()
	return reply, ofUpdate(err, begin.UpdateId)
}

func sendUpdate(
	ctx context.Context,
	stream grpc.ClientStreamingClient[penstockv1.UpdateWeightsRequest, penstockv1.UpdateWeightsResponse],
	begin *penstockv1.UpdateWeightsBegin, tensors []Tensor, chunkBytes int,
) error {
	err := stream.Send(&penstockv1.UpdateWeightsRequest{Step: &penstockv1.UpdateWeightsRequest_Begin{Begin: begin}})
	if err != nil {
		return err
	}
	total := uint64(0)
	for index, tensor := range tensors {
		err := pieces(ctx, tensor, chunkBytes, func(offset uint64, data []byte) error {
			total += uint64(len(data))
			chunk := &penstockv1.TensorChunk{TensorIndex: uint32(index), Offset: offset, Data: data}
			return stream.Send(&penstockv1.UpdateWeightsRequest{Step: &penstockv1.UpdateWeightsRequest_Chunk{Chunk: chunk}})
		})
		if err != nil {
			return err
		}
	}
	commit := &penstockv1.UpdateWeightsCommit{TotalBytes: total}
	return stream.Send(&penstockv1.UpdateWeightsRequest{Step: &penstockv1.UpdateWeightsRequest_Commit{Commit: commit}})
}

// pieces reads a tensor in pieces of at most this many bytes. What take is given is overwritten by the next piece.
func pieces(ctx context.Context, tensor Tensor, most int, take func(offset uint64, data []byte) error) error {
	left, err := tensor.numBytes()
	if err != nil {
		return fmt.Errorf("penstock: %w", err)
	}
	if left > 0 && tensor.Data == nil {
		return fmt.Errorf("penstock: the tensor %s has no Data", tensor.Name)
	}
	buffer := make([]byte, min(left, uint64(most)))
	for offset := uint64(0); left > 0; {
		if err := ctx.Err(); err != nil {
			return typed(status.FromContextError(err).Err())
		}
		data := buffer[:min(left, uint64(most))]
		if n, err := tensor.Data.ReadAt(data, int64(offset)); n < len(data) {
			return fmt.Errorf("penstock: the tensor %s cannot be read at byte %d: %w", tensor.Name, offset, err)
		}
		if err := take(offset, data); err != nil {
			return err
		}
		offset, left = offset+uint64(len(data)), left-uint64(len(data))
	}
	return nil
}

// ofUpdate adds the update's id to an error, so that the caller can send the update again.
func ofUpdate(err error, id string) error {
	if failed := new(Error); errors.As(err, &failed) {
		failed.UpdateID = id
	}
	return err
}
