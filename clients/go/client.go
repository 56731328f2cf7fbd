package penstock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"penstock/clients/go/penstockv1"
)

// servingService is the name whose health says that requests are taken.
const servingService = "penstock.v1.InferenceService"

// Generate runs a prompt to its end and returns all outputs. It is not idempotent: calling it again generates again.
// The deadline of the context goes to the server, which frees the request when it has passed.
func (c *Client) Generate(
	ctx context.Context, request *penstockv1.GenerateRequest, options ...grpc.CallOption,
) (*penstockv1.GenerateResponse, error) {
	return c.Inference.Generate(ctx, request, options...)
}

// Stream runs a prompt and gives its events while tokens are generated: one started, deltas, one finished for each
// output, one summary.
//
//	for event, err := range client.Stream(ctx, request) {
//		if err != nil {
//			return err
//		}
//		fmt.Print(event.GetDelta().GetText())
//	}
//
// An error is the last thing that comes. Leaving the loop ends the request at the server. Each loop over the sequence
// makes a call of its own.
func (c *Client) Stream(
	ctx context.Context, request *penstockv1.StreamRequest, options ...grpc.CallOption,
) iter.Seq2[*penstockv1.StreamResponse, error] {
	return messages(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[penstockv1.StreamResponse], error) {
		return c.Inference.Stream(ctx, request, options...)
	})
}

// WatchLoad gives the server's load at once and then after every interval, until the loop is left or the context ends.
func (c *Client) WatchLoad(
	ctx context.Context, request *penstockv1.WatchLoadRequest, options ...grpc.CallOption,
) iter.Seq2[*penstockv1.WatchLoadResponse, error] {
	return messages(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[penstockv1.WatchLoadResponse], error) {
		return c.Control.WatchLoad(ctx, request, options...)
	})
}

// Profile records a profile of the server's next steps, and gives its events: started, finished, and chunks of a zip
// file if the request includes the data. Leaving the loop ends the profile.
func (c *Client) Profile(
	ctx context.Context, request *penstockv1.ProfileRequest, options ...grpc.CallOption,
) iter.Seq2[*penstockv1.ProfileResponse, error] {
	return messages(ctx, func(ctx context.Context) (grpc.ServerStreamingClient[penstockv1.ProfileResponse], error) {
		return c.Control.Profile(ctx, request, options...)
	})
}

// messages makes a sequence of the messages of a call, which is cancelled when the loop over them is left.
func messages[T any](
	ctx context.Context, open func(context.Context) (grpc.ServerStreamingClient[T], error),
) iter.Seq2[*T, error] {
	return func(yield func(*T, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := open(ctx)
		if err != nil {
			yield(nil, err)
			return
		}
		for {
			message, err := stream.Recv()
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(nil, err)
				return
			}
			if !yield(message, nil) {
				return
			}
		}
	}
}

// WaitReady waits until the server takes requests: from when every program is compiled. It returns an error that says
// what the server's health was last if the context ends before that, and at once if the server cannot be asked.
func (c *Client) WaitReady(ctx context.Context) error {
	last := "nobody answered"
	for {
		found, err := c.health(ctx)
		switch {
		case err == nil && found == "":
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("penstock: the server was not ready: %s: %w", last, context.Cause(ctx))
		case err != nil:
			return err
		}
		last = found
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// health asks once. It gives what speaks against readiness, or an error if waiting does not help.
func (c *Client) health(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	reply, err := c.Health.Check(ctx, &healthpb.HealthCheckRequest{Service: servingService})
	if err == nil {
		if reply.Status == healthpb.HealthCheckResponse_SERVING {
			return "", nil
		}
		return "its health is " + reply.Status.String(), nil
	}
	if failed := new(Error); errors.As(err, &failed) {
		switch failed.Code {
		case codes.Unavailable, codes.DeadlineExceeded:
			return failed.Message, nil
		case codes.Canceled: // by a server that leaves; what was cancelled here, or closed, stays so
			if failed.lost {
				return failed.Message, nil
			}
		case codes.NotFound: // the health service answers before ours is registered
			return "its health is not known yet", nil
		}
	}
	return "", err
}
