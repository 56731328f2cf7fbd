package penstock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"penstock/clients/go/penstockv1"
)

// Error is why a call failed.
//
//	var failed *penstock.Error
//	switch {
//	case errors.Is(err, penstock.ErrPromptTooLong):
//		// the request must change
//	case errors.As(err, &failed) && failed.Retryable():
//		time.Sleep(failed.RetryAfter)
//	}
//
// status.FromError and status.Code of gRPC know it as well.
type Error struct {
	// Code is gRPC's status.
	Code codes.Code
	// Message says what is wrong, for people.
	Message string
	// Reason is the reason of Penstock, such as "QUEUE_FULL". It is empty if gRPC itself, or a proxy, made the error.
	Reason Reason
	// Metadata has the facts that belong to the reason, such as both numbers of PROMPT_TOO_LONG.
	Metadata map[string]string
	// Violations has every bad field of the request.
	Violations []Violation
	// RetryAfter is how long the server asks to wait before the same call. It is 0 if the server did not say.
	RetryAfter time.Duration
	// RequestID is the request's id, as in the server's log; empty if the server did not say.
	RequestID string
	// TensorErrors has every bad tensor of a weight update; nil for other errors.
	TensorErrors *penstockv1.TensorErrors
	// UpdateID is the id of the weight update that failed, so that it can be sent again under the same id; empty for
	// other calls.
	UpdateID string

	status *status.Status
	lost   bool // a connection that ended took the call with it, before anything of its answer had come
}

// Violation says what is wrong with one field of a request.
type Violation struct {
	// Field is the path of the field in the contract, such as "sampling.top_p".
	Field       string
	Description string
}

// Error gives the status, the reason and the message.
func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s (%s): %s", e.Code, string(e.Reason), e.Message)
}

// Is makes errors.Is true for the reason of the error.
func (e *Error) Is(other error) bool {
	reason, ok := other.(Reason)
	return ok && reason == e.Reason
}

// GRPCStatus gives gRPC's functions the status with all of its details.
func (e *Error) GRPCStatus() *status.Status { return e.status }

// Retryable says whether the same call may succeed later, or at another server: the server said when to come back, or
// nobody answered. Only call again if nothing of the answer had come.
func (e *Error) Retryable() bool {
	return e.Code == codes.Unavailable || e.RetryAfter > 0 || e.lost
}

// typed makes an *Error of what gRPC returns. nil and io.EOF, the end of a stream, stay as they are.
func typed(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	if found := new(Error); errors.As(err, &found) {
		return err
	}
	from, ok := status.FromError(err)
	if !ok {
		return err
	}
	found := &Error{Code: from.Code(), Message: from.Message(), status: from}
	for _, detail := range from.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == "penstock" {
				found.Reason, found.Metadata = Reason(detail.Reason), detail.Metadata
			}
		case *errdetails.BadRequest:
			for _, bad := range detail.FieldViolations {
				found.Violations = append(found.Violations, Violation{bad.Field, bad.Description})
			}
		case *errdetails.RetryInfo:
			found.RetryAfter = detail.RetryDelay.AsDuration()
		case *errdetails.RequestInfo:
			found.RequestID = detail.RequestId
		case *penstockv1.TensorErrors:
			found.TensorErrors = detail
		}
	}
	return found
}

func typedUnary(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	return markLost(ctx, typed(invoke(ctx, method, request, reply, conn, options...)))
}

func typedStream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer,
	options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	stream, err := open(ctx, desc, conn, method, options...)
	if err != nil {
		return nil, markLost(ctx, typed(err))
	}
	return &typedClientStream{ClientStream: stream, ctx: ctx}, nil
}

// typedClientStream is a stream whose errors are typed.
type typedClientStream struct {
	grpc.ClientStream
	ctx   context.Context // the caller's: that of the stream is always cancelled at its end
	began bool            // whether something of the answer has come
}

func (s *typedClientStream) Header() (metadata.MD, error) {
	header, err := s.ClientStream.Header()
	return header, typed(err)
}

func (s *typedClientStream) SendMsg(message any) error { return typed(s.ClientStream.SendMsg(message)) }

func (s *typedClientStream) RecvMsg(message any) error {
	err := typed(s.ClientStream.RecvMsg(message))
	if err == nil {
		s.began = true
	}
	if s.began {
		return err
	}
	return markLost(s.ctx, err)
}

func (s *typedClientStream) CloseSend() error { return typed(s.ClientStream.CloseSend()) }

// markLost marks the error of a call that ended as cancelled although nobody here has cancelled it: so ends a call
// that meets a server's goodbye on its way.
func markLost(ctx context.Context, err error) error {
	if failed := new(Error); errors.As(err, &failed) {
		closed := strings.HasSuffix(failed.Message, "the client connection is closing")
		failed.lost = failed.Code == codes.Canceled && failed.Reason == "" && ctx.Err() == nil && !closed
	}
	return err
}
