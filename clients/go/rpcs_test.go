package penstock_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

// recorder notes which methods were called.
type recorder struct {
	mutex sync.Mutex
	seen  map[string]bool
}

func (r *recorder) note(method string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.seen[method] = true
}

func (r *recorder) options() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(func(
			ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
			options ...grpc.CallOption,
		) error {
			r.note(method)
			return invoke(ctx, method, request, reply, conn, options...)
		}),
		grpc.WithChainStreamInterceptor(func(
			ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer,
			options ...grpc.CallOption,
		) (grpc.ClientStream, error) {
			r.note(method)
			return open(ctx, desc, conn, method, options...)
		}),
	}
}

func TestEveryMethodOfTheContract(t *testing.T) {
	called := &recorder{seen: map[string]bool{}}
	client := dial(t, demo.addr, penstock.WithDialOptions(called.options()...))
	ctx := limited(t)
	want := tokens(t, client)

	info := must[*penstockv1.GetModelInfoResponse](t)(
		client.Control.GetModelInfo(ctx, &penstockv1.GetModelInfoRequest{IncludeTensors: true}))
	if info.Model != "demo" || len(info.Tensors) != 46 {
		t.Error(info.Model, len(info.Tensors))
	}
	server := must[*penstockv1.GetServerInfoResponse](t)(client.Control.GetServerInfo(ctx, &penstockv1.GetServerInfoRequest{}))
	if server.MaxChunkBytes == 0 || server.InstanceId == "" {
		t.Error(server)
	}
	split := must[*penstockv1.TokenizeResponse](t)(client.Control.Tokenize(ctx, &penstockv1.TokenizeRequest{
		Input: &penstockv1.TokenizeRequest_Text{Text: "Once upon a time"},
	}))
	joined := must[*penstockv1.DetokenizeResponse](t)(
		client.Control.Detokenize(ctx, &penstockv1.DetokenizeRequest{TokenIds: split.TokenIds}))
	if joined.Text != "Once upon a time" || len(split.TokenIds) == 0 {
		t.Error(split, joined)
	}

	ids := &penstockv1.TokenIds{Ids: split.TokenIds}
	made := must[*penstockv1.EmbedResponse](t)(client.Inference.Embed(ctx, &penstockv1.EmbedRequest{
		Inputs: []*penstockv1.EmbedInput{{Input: &penstockv1.EmbedInput_TokenIds{TokenIds: ids}}},
	}))
	if len(made.Embeddings) != 1 || len(made.Embeddings[0].Values) == 0 || len(made.Embeddings[0].Values)%4 != 0 {
		t.Error(made)
	}
	scored := must[*penstockv1.ScoreResponse](t)(client.Inference.Score(ctx, &penstockv1.ScoreRequest{
		Input:         &penstockv1.ScoreRequest_PromptTokenIds{PromptTokenIds: ids},
		Continuations: []*penstockv1.Continuation{{Continuation: &penstockv1.Continuation_TokenIds{TokenIds: ids}}},
	}))
	if len(scored.Scores) != 1 || len(scored.Scores[0].Logprobs) != len(split.TokenIds) {
		t.Error(scored)
	}

	ranked := must[*penstockv1.RerankResponse](t)(client.Inference.Rerank(ctx, &penstockv1.RerankRequest{
		Query: "Once upon", Documents: []string{"a time", "Once upon"},
	}))
	if len(ranked.Results) != 2 || ranked.Results[0].Index != 1 {
		t.Error(ranked)
	}

	// The model has no classifier.
	classify := &penstockv1.ClassifyRequest{
		Inputs: []*penstockv1.ClassifyInput{{Input: &penstockv1.ClassifyInput_TokenIds{TokenIds: ids}}},
	}
	if _, err := client.Inference.Classify(ctx, classify); !errors.Is(err, penstock.ErrUnsupportedFeature) {
		t.Error(err)
	}

	page := must[*penstockv1.GetVocabularyResponse](t)(
		client.Control.GetVocabulary(ctx, &penstockv1.GetVocabularyRequest{FirstTokenId: split.TokenIds[0]}))
	if !page.IsExact || !strings.HasPrefix("Once upon a time", string(page.Tokens[0])) || len(page.Tokens[0]) == 0 {
		t.Error(page.Tokens[0])
	}

	// A request that waits on a paused server is aborted.
	must[*penstockv1.PauseResponse](t)(client.Control.Pause(ctx, &penstockv1.PauseRequest{}))
	waiting := greedy(8)
	waiting.RequestId = "waits"
	var ended *penstockv1.Finish
	for event, err := range client.Stream(ctx, waiting) {
		if err != nil {
			t.Fatal(err)
		}
		if event.GetStarted() != nil {
			if load := must[*penstockv1.GetLoadResponse](t)(client.Control.GetLoad(ctx, &penstockv1.GetLoadRequest{})); !load.Paused {
				t.Error(load)
			}
			done := must[*penstockv1.AbortResponse](t)(client.Inference.Abort(ctx, &penstockv1.AbortRequest{
				Target: &penstockv1.AbortRequest_RequestIds{RequestIds: &penstockv1.RequestIds{Ids: []string{"waits"}}},
				Reason: "enough",
			}))
			if done.Results[0].Outcome != penstockv1.AbortOutcome_ABORT_OUTCOME_ABORTED {
				t.Error(done)
			}
		}
		if event.GetFinished() != nil {
			ended = event.GetFinished().Finish
		}
	}
	if ended.GetReason() != penstockv1.FinishReason_FINISH_REASON_ABORTED || ended.GetMessage() != "enough" {
		t.Error(ended)
	}
	must[*penstockv1.ResumeResponse](t)(client.Control.Resume(ctx, &penstockv1.ResumeRequest{}))
	must[*penstockv1.FlushCacheResponse](t)(client.Control.FlushCache(ctx, &penstockv1.FlushCacheRequest{}))

	// One staged update is swapped in, another one is dropped.
	for _, what := range []string{"to-commit", "to-discard"} {
		id := unique(what)
		begin := &penstockv1.UpdateWeightsBegin{UpdateId: id, VersionLabel: id, StageOnly: true}
		staged := must[*penstockv1.UpdateWeightsResponse](t)(client.UpdateWeights(ctx, begin, demoWeights()))
		if staged.Outcome != penstockv1.UpdateOutcome_UPDATE_OUTCOME_STAGED {
			t.Error(staged)
		}
		if what == "to-commit" {
			done := must[*penstockv1.CommitWeightsResponse](t)(
				client.Control.CommitWeights(ctx, &penstockv1.CommitWeightsRequest{UpdateId: id}))
			if done.Current.Generation != info.Weights.Generation+1 || done.Current.Label != id {
				t.Error(done)
			}
			continue
		}
		done := must[*penstockv1.DiscardWeightsResponse](t)(
			client.Control.DiscardWeights(ctx, &penstockv1.DiscardWeightsRequest{UpdateId: id}))
		if !done.Discarded {
			t.Error(done)
		}
	}
	whole := must[*penstockv1.GenerateResponse](t)(client.Generate(ctx, &penstockv1.GenerateRequest{
		Input: &penstockv1.GenerateRequest_Prompt{Prompt: "Once upon a time"}, Sampling: greedy(1).Sampling, Stopping: greedy(16).Stopping,
	}))
	if got := whole.Outputs[0].TokenIds; !slices.Equal(got, want) {
		t.Error(got, want)
	}

	traced := must[*penstockv1.SetTracingResponse](t)(client.Control.SetTracing(ctx, &penstockv1.SetTracingRequest{}))
	if traced.Current != penstockv1.TraceLevel_TRACE_LEVEL_OFF {
		t.Error(traced)
	}
	_, err := client.Control.SetTracing(ctx, &penstockv1.SetTracingRequest{Level: penstockv1.TraceLevel_TRACE_LEVEL_STEPS})
	if !errors.Is(err, penstock.ErrUnsupportedFeature) {
		t.Error(err)
	}
	for report, err := range client.WatchLoad(ctx, &penstockv1.WatchLoadRequest{MaxRequests: 5}) {
		if err != nil || report.Load == nil || len(report.Requests) != 0 {
			t.Error(report, err)
		}
		break
	}
	profile(t, client)
	adapters(t, client)

	var all []string
	for _, file := range []protoreflect.FileDescriptor{
		penstockv1.File_penstock_v1_inference_proto, penstockv1.File_penstock_v1_control_proto,
	} {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				all = append(all, "/"+string(service.FullName())+"/"+string(service.Methods().Get(j).Name()))
			}
		}
	}
	slices.Sort(all)
	if got := slices.Sorted(maps.Keys(called.seen)); !slices.Equal(got, all) || len(all) < 17 {
		t.Errorf("called\n%v\nof\n%v", got, all)
	}
}

// adapters calls what is about adapters, of which this server has none.
func adapters(t *testing.T, client *penstock.Client) {
	t.Helper()
	ctx := limited(t)
	listed := must[*penstockv1.ListAdaptersResponse](t)(
		client.Control.ListAdapters(ctx, &penstockv1.ListAdaptersRequest{}))
	if len(listed.Adapters) != 0 {
		t.Error(listed)
	}
	_, loaded := client.Control.LoadAdapter(ctx, &penstockv1.LoadAdapterRequest{Name: "sql"})
	_, unloaded := client.Control.UnloadAdapter(ctx, &penstockv1.UnloadAdapterRequest{Name: "sql"})
	_, pinned := client.Control.PinAdapter(ctx, &penstockv1.PinAdapterRequest{Name: "sql"})
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "adapter_config.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(demoWeights(), filepath.Join(dir, "adapter_model.safetensors")); err != nil {
		t.Fatal(err)
	}
	_, pushed := client.PushAdapter(ctx, &penstockv1.PushAdapterBegin{Name: "sql"}, dir)
	for _, err := range []error{loaded, unloaded, pinned, pushed} {
		if !errors.Is(err, penstock.ErrUnsupportedFeature) {
			t.Error(err)
		}
	}
}

// profile records a step or two, and receives the files.
func profile(t *testing.T, client *penstock.Client) {
	t.Helper()
	var kinds []string
	var size int
	for event, err := range client.Profile(limited(t), &penstockv1.ProfileRequest{Steps: ptr(uint32(1)), IncludeData: true}) {
		if err != nil {
			t.Fatal(err)
		}
		switch event := event.Event.(type) {
		case *penstockv1.ProfileResponse_Started:
			kinds = append(kinds, "started")
			tokens(t, client)
		case *penstockv1.ProfileResponse_Finished:
			kinds = append(kinds, "finished")
		case *penstockv1.ProfileResponse_Chunk:
			if size == 0 && string(event.Chunk.Data[:2]) != "PK" {
				t.Error("no zip file")
			}
			size += len(event.Chunk.Data)
			kinds = append(kinds, "chunk")
		}
	}
	if got := slices.Compact(kinds); !slices.Equal(got, []string{"started", "finished", "chunk"}) {
		t.Error(got)
	}
}
