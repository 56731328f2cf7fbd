package penstock_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

func TestAShutdownEndsStreamsWholeAndTellsOthersToGo(t *testing.T) {
	t.Parallel()
	const outputs = 48
	socket := filepath.Join(t.TempDir(), "demo.sock")
	ready := make(chan error, 1)
	go func() { // from before the server listens
		err := triedAgain(t.Context(), "unix:"+socket)
		client, failed := penstock.Dial("unix:" + socket)
		if failed == nil {
			failed = client.WaitReady(t.Context())
			_ = client.Close()
		}
		ready <- errors.Join(err, failed)
	}()
	server := started(t, "--grace", "120", "--unix-socket", socket)
	if err := <-ready; err != nil {
		t.Errorf("waiting from before it started: %v", err)
	}
	client := dial(t, server.addr, penstock.WithoutRetries())

	watched := make(chan error, 1)
	watching := make(chan bool)
	go func() {
		var last error
		for _, err := range client.WatchLoad(t.Context(), &penstockv1.WatchLoadRequest{}) {
			if last = err; err == nil {
				select {
				case watching <- true:
				default:
				}
			}
		}
		watched <- last
	}()
	<-watching

	signalled := false
	finished := map[uint32]penstockv1.FinishReason{}
	tokens := 0
	var summary *penstockv1.StreamSummary
	for event, err := range client.Stream(t.Context(), long(outputs)) {
		if err != nil {
			t.Fatal(err)
		}
		if delta := event.GetDelta(); delta != nil {
			tokens += len(delta.TokenIds)
		}
		if done := event.GetFinished(); done != nil {
			finished[done.Index] = done.Finish.Reason
		}
		summary = event.GetSummary()
		if event.GetDelta() != nil && !signalled {
			signalled = true
			if err := server.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := <-watched; !errors.Is(err, penstock.ErrDraining) {
				t.Errorf("who watched was told %v", err)
			}
			turnedAway(t, client)
		}
	}
	if len(finished) != outputs || tokens != outputs*500 || summary.GetUsage().GetCompletionTokens() != outputs*500 {
		t.Errorf("%d outputs, %d tokens, %v", len(finished), tokens, summary)
	}
	for index, reason := range finished {
		if reason != penstockv1.FinishReason_FINISH_REASON_MAX_TOKENS {
			t.Errorf("the output %d ended with %s", index, reason)
		}
	}
	select {
	case <-server.ended:
	case <-time.After(waitLimit):
		t.Fatal("the server goes on")
	}
	if code := server.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// turnedAway makes new calls until the server takes none any more: it says DRAINING, or listens no longer.
func turnedAway(t *testing.T, client *penstock.Client) {
	t.Helper()
	until(t, "new calls are refused", func() bool {
		_, err := client.Generate(limited(t), &penstockv1.GenerateRequest{
			Input: &penstockv1.GenerateRequest_Prompt{Prompt: "x"}, Stopping: &penstockv1.StoppingParams{MaxTokens: ptr(uint32(1))},
		})
		var failed *penstock.Error
		if errors.As(err, &failed) && failed.Reason != "" && failed.Reason != penstock.ErrDraining {
			t.Errorf("a new call was told %v", err)
		}
		return status.Code(err) == codes.Unavailable
	})
}

// attempts counts those of the calls of a client.
type attempts struct{ made atomic.Int32 }

func (*attempts) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (*attempts) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (*attempts) HandleConn(context.Context, stats.ConnStats)                       {}

func (a *attempts) HandleRPC(_ context.Context, what stats.RPCStats) {
	if _, ok := what.(*stats.OutHeader); ok {
		a.made.Add(1)
	}
}

// triedAgain calls a server that is loading, and gives an error if a refused call was not made again.
func triedAgain(ctx context.Context, addr string) error {
	once, err := penstock.Dial(addr, penstock.WithoutRetries())
	if err != nil {
		return err
	}
	defer func() { _ = once.Close() }()
	for !errors.Is(err, penstock.ErrNotReady) {
		if _, err = once.Control.GetLoad(ctx, &penstockv1.GetLoadRequest{}); err == nil || ctx.Err() != nil {
			return ctx.Err() // it is ready already
		}
		time.Sleep(10 * time.Millisecond)
	}
	counted := &attempts{}
	client, err := penstock.Dial(addr, penstock.WithDialOptions(grpc.WithStatsHandler(counted)))
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	if _, err = client.Control.GetLoad(ctx, &penstockv1.GetLoadRequest{}); err != nil && counted.made.Load() < 2 {
		return fmt.Errorf("not made again: %w", err)
	}
	return nil
}
