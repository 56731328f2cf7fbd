package penstock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

func TestAStreamHasWhatGenerateReturns(t *testing.T) {
	client := dial(t, demo.addr)
	request := greedy(12)
	whole, err := client.Generate(limited(t), &penstockv1.GenerateRequest{
		Input:    &penstockv1.GenerateRequest_Prompt{Prompt: request.GetPrompt()},
		Sampling: request.Sampling,
		Stopping: request.Stopping,
	})
	if err != nil {
		t.Fatal(err)
	}
	output := whole.Outputs[0]
	if len(output.TokenIds) != 12 || output.Finish.Reason != penstockv1.FinishReason_FINISH_REASON_MAX_TOKENS {
		t.Fatalf("%v", whole)
	}
	var kinds []string
	var text strings.Builder
	var ids []uint32
	for event, err := range client.Stream(limited(t), request) {
		if err != nil {
			t.Fatal(err)
		}
		switch event := event.Event.(type) {
		case *penstockv1.StreamResponse_Started:
			kinds = append(kinds, "started")
		case *penstockv1.StreamResponse_Delta:
			text.WriteString(event.Delta.Text)
			ids = append(ids, event.Delta.TokenIds...)
			kinds = append(kinds, "delta")
		case *penstockv1.StreamResponse_Finished:
			kinds = append(kinds, "finished")
		case *penstockv1.StreamResponse_Summary:
			kinds = append(kinds, "summary")
		}
	}
	if text.String() != output.Text || !slices.Equal(ids, output.TokenIds) {
		t.Errorf("%q %v is not %q %v", text.String(), ids, output.Text, output.TokenIds)
	}
	if got := strings.Join(slices.Compact(kinds), " "); got != "started delta finished summary" {
		t.Error(got)
	}
}

func TestLeavingAStreamEndsTheRequestAtTheServer(t *testing.T) {
	client := dial(t, demo.addr)
	before := cancelled(t, client)
	for event, err := range client.Stream(limited(t), long(128)) {
		if err != nil {
			t.Fatal(err)
		}
		if event.GetDelta() != nil {
			break
		}
	}
	until(t, "its outputs end as cancelled", func() bool { return cancelled(t, client) > before })
	idle(t, client)
}

func TestACancelledContextEndsAStream(t *testing.T) {
	client := dial(t, demo.addr)
	ctx, cancel := context.WithCancel(limited(t))
	defer cancel()
	var last error
	for _, err := range client.Stream(ctx, long(128)) {
		cancel()
		last = err
	}
	if status.Code(last) != codes.Canceled {
		t.Error(last)
	}
	idle(t, client)
}

func TestADeadlineEndsACallAndFreesItsPlace(t *testing.T) {
	client := dial(t, demo.addr)
	// On a paused server no request ends before its deadline.
	if _, err := client.Control.Pause(limited(t), &penstockv1.PauseRequest{}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if _, err := client.Control.Resume(limited(t), &penstockv1.ResumeRequest{}); err != nil {
			t.Error(err)
		}
	}()
	// On a busy machine a short deadline may pass before the request has started.
	for started, timeout := false, 300*time.Millisecond; !started; timeout *= 4 {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		var last error
		for event, err := range client.Stream(ctx, greedy(4)) {
			started = started || event.GetStarted().GetPaused()
			last = err
		}
		cancel()
		var failed *penstock.Error
		if !errors.As(last, &failed) || failed.Code != codes.DeadlineExceeded {
			t.Fatal(last)
		}
		if !started && timeout > waitLimit {
			t.Fatal("no request starts")
		}
		idle(t, client)
	}
}

func TestMessagesHaveLimits(t *testing.T) {
	small := dial(t, demo.addr, penstock.WithMaxMessageBytes(200))
	_, err := small.Generate(limited(t), &penstockv1.GenerateRequest{
		Input:    &penstockv1.GenerateRequest_Prompt{Prompt: "Once upon a time"},
		Stopping: &penstockv1.StoppingParams{MaxTokens: ptr(uint32(200)), IgnoreEos: true},
	})
	var failed *penstock.Error
	if !errors.As(err, &failed) || failed.Code != codes.ResourceExhausted || failed.Reason != "" {
		t.Errorf("the client's own limit: %v", err)
	}
	client := dial(t, demo.addr)
	// The server takes 8 MiB; gRPC itself refuses only what has more than twice that.
	_, err = client.Control.Tokenize(limited(t), &penstockv1.TokenizeRequest{
		Input: &penstockv1.TokenizeRequest_Text{Text: strings.Repeat("x", 9<<20)},
	})
	if !errors.Is(err, penstock.ErrMessageTooLarge) {
		t.Errorf("the server's limit: %v", err)
	}
}

// cancelled is how many outputs have ended because their caller went away, in the life of the server.
func cancelled(t *testing.T, client *penstock.Client) uint64 {
	t.Helper()
	for report, err := range client.WatchLoad(limited(t), &penstockv1.WatchLoadRequest{}) {
		if err != nil {
			t.Fatal(err)
		}
		return report.Totals.Ended.Cancelled
	}
	t.Fatal("no report")
	return 0
}

// idle waits until nothing runs and nothing waits.
func idle(t *testing.T, client *penstock.Client) {
	t.Helper()
	until(t, "the places are free", func() bool {
		load, err := client.Control.GetLoad(limited(t), &penstockv1.GetLoadRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return load.RunningRequests == 0 && load.QueuedRequests == 0 && load.KvPagesUsed == 0
	})
}
