package penstock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"penstock/clients/go/penstockv1"
)

// PushAdapter sends a LoRA adapter to the server, so that requests may ask for it by begin's name. dir is a folder that
// PEFT wrote, with adapter_config.json and adapter_model.safetensors; begin's config_json and manifest must be unset.
//
// A call that ends with an error has changed nothing, and may be made again: the same adapter may be sent twice.
//
// A client of several servers (dns:///) cannot push adapters, because they would no longer serve the same: make a client
// for each.
func (c *Client) PushAdapter(
	ctx context.Context, begin *penstockv1.PushAdapterBegin, dir string, options ...grpc.CallOption,
) (*penstockv1.PushAdapterResponse, error) {
	config, err := os.ReadFile(filepath.Join(dir, "adapter_config.json"))
	if err != nil {
		return nil, fmt.Errorf("penstock: %w", err)
	}
	found, err := OpenSafetensors(filepath.Join(dir, "adapter_model.safetensors"))
	if err != nil {
		return nil, fmt.Errorf("penstock: %w", err)
	}
	defer func() { _ = found.Close() }() // they were only read
	if begin.GetConfigJson() != "" {
		return nil, errors.New("penstock: begin.config_json must be unset: the method fills it in")
	}
	whole := &penstockv1.PushAdapterBegin{}
	proto.Merge(whole, begin)
	whole.ConfigJson = string(config)
	return c.PushAdapterFromTensors(ctx, whole, found.Tensors, options...)
}

// PushAdapterFromTensors is [Client.PushAdapter] with tensors that are in memory, or anywhere, by the names that
// adapter_model.safetensors gives them, and with begin's config_json.
func (c *Client) PushAdapterFromTensors(
	ctx context.Context, begin *penstockv1.PushAdapterBegin, tensors []Tensor, options ...grpc.CallOption,
) (*penstockv1.PushAdapterResponse, error) {
	if c.balanced {
		return nil, errors.New("penstock: this client calls several servers in turn; to push adapters, make a client for each")
	}
	if begin.GetManifest() != nil {
		return nil, errors.New("penstock: begin.manifest must be unset: the method fills it in")
	}
	manifest, err := manifestOf(ctx, tensors, true)
	if err != nil {
		return nil, err
	}
	whole := &penstockv1.PushAdapterBegin{}
	proto.Merge(whole, begin)
	whole.Manifest = manifest
	info, err := c.Control.GetServerInfo(ctx, &penstockv1.GetServerInfoRequest{})
	if err != nil {
		return nil, err
	}
	chunkBytes := min(mostChunkBytes, c.chunkRoom)
	// It is 0 for a server that takes no adapters, which says so itself when one begins.
	if info.MaxChunkBytes > 0 {
		chunkBytes = min(chunkBytes, int(info.MaxChunkBytes))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Control.PushAdapter(ctx, options...)
	if err != nil {
		return nil, err
	}
	err = sendAdapter(ctx, stream, whole, tensors, chunkBytes)
	if err != nil && err != io.EOF { // io.EOF: the server has answered already, and the answer says why
		return nil, err
	}
	return stream.CloseAndRecv()
}

func sendAdapter(
	ctx context.Context,
	stream grpc.ClientStreamingClient[penstockv1.PushAdapterRequest, penstockv1.PushAdapterResponse],
	begin *penstockv1.PushAdapterBegin, tensors []Tensor, chunkBytes int,
) error {
	err := stream.Send(&penstockv1.PushAdapterRequest{Step: &penstockv1.PushAdapterRequest_Begin{Begin: begin}})
	if err != nil {
		return err
	}
	total := uint64(0)
	for index, tensor := range tensors {
		err := pieces(ctx, tensor, chunkBytes, func(offset uint64, data []byte) error {
			total += uint64(len(data))
			chunk := &penstockv1.TensorChunk{TensorIndex: uint32(index), Offset: offset, Data: data}
			return stream.Send(&penstockv1.PushAdapterRequest{Step: &penstockv1.PushAdapterRequest_Chunk{Chunk: chunk}})
		})
		if err != nil {
			return err
		}
	}
	commit := &penstockv1.PushAdapterCommit{TotalBytes: total}
	return stream.Send(&penstockv1.PushAdapterRequest{Step: &penstockv1.PushAdapterRequest_Commit{Commit: commit}})
}
