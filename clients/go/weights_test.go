package penstock_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

func demoWeights() string {
	return filepath.Join(root(), "runtime", "penstock", "runtime", "loading", "demo_model", "model.safetensors")
}

func serving(t *testing.T, client *penstock.Client) *penstockv1.GetModelInfoResponse {
	t.Helper()
	return must[*penstockv1.GetModelInfoResponse](t)(
		client.Control.GetModelInfo(limited(t), &penstockv1.GetModelInfoRequest{}))
}

// tokens are what the served weights generate.
func tokens(t *testing.T, client *penstock.Client) []uint32 {
	t.Helper()
	var found []uint32
	for event, err := range client.Stream(limited(t), greedy(16)) {
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, event.GetDelta().GetTokenIds()...)
	}
	return found
}

func TestNewWeightsServeOnceTheyAreSent(t *testing.T) {
	client := dial(t, demo.addr)
	before, want := serving(t, client).Weights, tokens(t, client)

	// An embedding of zeros makes every logit 0, so the output changes.
	const name = "model.embed_tokens.weight"
	zeros := penstock.Tensor{
		Name: name, DType: penstockv1.DataType_DATA_TYPE_BF16, Shape: []uint64{2048, 256},
		Data: bytes.NewReader(make([]byte, 2048*256*2)),
	}
	begin := &penstockv1.UpdateWeightsBegin{VersionLabel: "zeros", Partial: true}
	changed, err := client.UpdateWeightsFromTensors(limited(t), begin, []penstock.Tensor{zeros})
	if err != nil {
		t.Fatal(err)
	}
	if begin.UpdateId != "" || begin.Source != nil {
		t.Errorf("the caller's message was changed: %v", begin)
	}
	if changed.Current.Generation != before.Generation+1 || changed.Current.Label != "zeros" || changed.BytesReceived != 1<<20 {
		t.Errorf("%v", changed)
	}
	if slices.Equal(tokens(t, client), want) {
		t.Error("the model still generates what it did")
	}

	begin = &penstockv1.UpdateWeightsBegin{UpdateId: unique("whole"), VersionLabel: "again"}
	whole, err := client.UpdateWeights(limited(t), begin, demoWeights())
	if err != nil {
		t.Fatal(err)
	}
	if whole.Outcome != penstockv1.UpdateOutcome_UPDATE_OUTCOME_COMMITTED || whole.TensorsUpdated != 46 {
		t.Errorf("%v", whole)
	}
	if now := serving(t, client).Weights; now.Generation != before.Generation+2 || now.Label != "again" {
		t.Errorf("%v", now)
	}
	if got := tokens(t, client); !slices.Equal(got, want) {
		t.Errorf("%v is not %v", got, want)
	}

	repeated, err := client.UpdateWeights(limited(t), begin, demoWeights())
	if err != nil || repeated.Outcome != penstockv1.UpdateOutcome_UPDATE_OUTCOME_ALREADY_COMMITTED {
		t.Errorf("%v, %v", repeated, err)
	}
	if now := serving(t, client).Weights; now.Generation != before.Generation+2 {
		t.Errorf("%v", now)
	}
}

func TestChunksFitTheClientsOwnMessages(t *testing.T) {
	client := dial(t, demo.addr, penstock.WithMaxMessageBytes(100_000))
	// A whole tensor of 1 MiB and a manifest of many tensors: the one is cut, the other is small enough.
	reply, err := client.UpdateWeights(limited(t), &penstockv1.UpdateWeightsBegin{VersionLabel: "in-pieces"}, demoWeights())
	if err != nil || reply.Current.Label != "in-pieces" {
		t.Errorf("%v, %v", reply, err)
	}
}

func TestAnUpdateThatIsOnlyChecked(t *testing.T) {
	client := dial(t, demo.addr)
	before := serving(t, client).Weights.Generation
	begin := &penstockv1.UpdateWeightsBegin{VersionLabel: "checked", ValidateOnly: true}
	reply, err := client.UpdateWeights(limited(t), begin, demoWeights())
	if err != nil || reply.Outcome != penstockv1.UpdateOutcome_UPDATE_OUTCOME_VALIDATED {
		t.Errorf("%v, %v", reply, err)
	}
	if now := serving(t, client).Weights.Generation; now != before {
		t.Error(now)
	}
}

func TestARefusedUpdateNamesEveryBadTensor(t *testing.T) {
	client := dial(t, demo.addr)
	before := serving(t, client).Weights.Generation
	tensor := func(name string, shape ...uint64) penstock.Tensor {
		return penstock.Tensor{
			Name: name, DType: penstockv1.DataType_DATA_TYPE_BF16, Shape: shape, Data: bytes.NewReader(make([]byte, 1<<20)),
		}
	}
	begin := &penstockv1.UpdateWeightsBegin{UpdateId: "refused", VersionLabel: "x", Partial: true}
	_, err := client.UpdateWeightsFromTensors(limited(t), begin, []penstock.Tensor{
		tensor("model.norm.weight", 255), tensor("model.unknown", 4),
	})
	var failed *penstock.Error
	if !errors.Is(err, penstock.ErrInvalidTensors) || !errors.As(err, &failed) {
		t.Fatal(err)
	}
	found := map[string]penstockv1.TensorErrorReason{}
	for _, bad := range failed.TensorErrors.GetErrors() {
		found[bad.Name] = bad.Reason
	}
	if len(found) != 2 || found["model.norm.weight"] != penstockv1.TensorErrorReason_TENSOR_ERROR_REASON_SHAPE ||
		found["model.unknown"] != penstockv1.TensorErrorReason_TENSOR_ERROR_REASON_UNKNOWN_NAME {
		t.Error(failed.TensorErrors)
	}
	if failed.UpdateID != "refused" {
		t.Error(failed.UpdateID)
	}
	if now := serving(t, client).Weights.Generation; now != before {
		t.Error(now)
	}
}

func TestAFileOfTheServersOwn(t *testing.T) {
	_, err := dial(t, demo.addr).UpdateWeightsFromURI(limited(t), &penstockv1.UpdateWeightsBegin{VersionLabel: "x"}, "file:///nowhere")
	var failed *penstock.Error
	// This server was started without --weights-root.
	if !errors.Is(err, penstock.ErrUnsupportedFeature) || !errors.As(err, &failed) || len(failed.UpdateID) != 32 {
		t.Errorf("%v %+v", err, failed)
	}
}

// changing is a tensor's data of which a later reading has other bytes.
type changing struct{ reads int }

func (c *changing) ReadAt(data []byte, _ int64) (int, error) {
	c.reads++
	clear(data)
	data[0] = byte(c.reads)
	return len(data), nil
}

// broken is data that cannot be read when it is to be sent.
type broken struct{ reads int }

func (b *broken) ReadAt(data []byte, _ int64) (int, error) {
	b.reads++
	if b.reads > 1 {
		return 0, io.ErrUnexpectedEOF
	}
	clear(data)
	return len(data), nil
}

func TestAnUpdateThatGoesWrongOnItsWayChangesNothing(t *testing.T) {
	client := dial(t, demo.addr)
	before := serving(t, client).Weights.Generation
	norm := penstock.Tensor{Name: "model.norm.weight", DType: penstockv1.DataType_DATA_TYPE_BF16, Shape: []uint64{256}}
	begin := &penstockv1.UpdateWeightsBegin{VersionLabel: "x", Partial: true}

	norm.Data = &changing{}
	_, err := client.UpdateWeightsFromTensors(limited(t), begin, []penstock.Tensor{norm})
	var failed *penstock.Error
	if !errors.Is(err, penstock.ErrChecksumMismatch) || !errors.As(err, &failed) ||
		failed.TensorErrors.GetErrors()[0].GetName() != "model.norm.weight" {
		t.Error(err)
	}

	norm.Data = &broken{}
	if _, err := client.UpdateWeightsFromTensors(limited(t), begin, []penstock.Tensor{norm}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}

	norm.Data = nil
	_, err = client.UpdateWeightsFromTensors(limited(t), begin, []penstock.Tensor{norm})
	if err == nil || !strings.Contains(err.Error(), "model.norm.weight has no Data") {
		t.Error(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	norm.Data = bytes.NewReader(make([]byte, 512))
	if _, err := client.UpdateWeightsFromTensors(ctx, begin, []penstock.Tensor{norm}); status.Code(err) != codes.Canceled {
		t.Error(err)
	}

	begin.Source = &penstockv1.UpdateWeightsBegin_Uri{Uri: "file:///x"}
	if _, err := client.UpdateWeightsFromTensors(limited(t), begin, nil); err == nil {
		t.Error("a source besides the tensors was accepted")
	}
	if now := serving(t, client).Weights.Generation; now != before {
		t.Error(now)
	}
}
