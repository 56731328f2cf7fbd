package penstock_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

func TestAnErrorHasAllBadFields(t *testing.T) {
	client := dial(t, demo.addr)
	request := greedy(1)
	request.RequestId = "of-the-caller"
	request.Sampling = &penstockv1.SamplingParams{Temperature: ptr(-1.0), TopP: ptr(7.0)}
	for event, err := range client.Stream(limited(t), request) {
		var failed *penstock.Error
		if !errors.As(err, &failed) {
			t.Fatalf("%v, %v", event, err)
		}
		if !errors.Is(err, penstock.ErrInvalidField) || errors.Is(err, penstock.ErrPromptTooLong) {
			t.Error(failed.Reason)
		}
		var fields []string
		for _, violation := range failed.Violations {
			fields = append(fields, violation.Field)
		}
		if !slices.Equal(fields, []string{"sampling.temperature", "sampling.top_p"}) {
			t.Error(failed.Violations)
		}
		if failed.RequestID != "of-the-caller" || failed.Retryable() {
			t.Errorf("%+v", failed)
		}
		// gRPC's own functions find the same.
		if status.Code(err) != codes.InvalidArgument || len(status.Convert(err).Details()) != 3 {
			t.Error(status.Convert(err).Details())
		}
	}
}

func TestErrorsOfTheStubsAreTyped(t *testing.T) {
	client := dial(t, demo.addr)
	_, err := client.Inference.Generate(limited(t), &penstockv1.GenerateRequest{
		Model: "another", Input: &penstockv1.GenerateRequest_Prompt{Prompt: "x"},
	})
	var failed *penstock.Error
	if !errors.Is(err, penstock.ErrUnknownModel) || !errors.As(err, &failed) || failed.Metadata["served_model"] != "demo" {
		t.Error(err)
	}
	stream, err := client.Control.Profile(limited(t), &penstockv1.ProfileRequest{Steps: ptr(uint32(0))})
	if err == nil {
		_, err = stream.Recv()
	}
	if !errors.Is(err, penstock.ErrInvalidField) {
		t.Error(err)
	}
	_, err = client.Inference.Generate(limited(t), &penstockv1.GenerateRequest{
		Input: &penstockv1.GenerateRequest_PromptTokenIds{PromptTokenIds: &penstockv1.TokenIds{Ids: make([]uint32, 30000)}},
	})
	if !errors.Is(err, penstock.ErrPromptTooLong) || !errors.As(err, &failed) || failed.Metadata["prompt_tokens"] != "30000" {
		t.Error(err)
	}
}

func TestAReasonOfSomebodyElseIsNone(t *testing.T) {
	ended, err := status.New(codes.ResourceExhausted, "quota").WithDetails(
		&errdetails.ErrorInfo{Reason: "QUEUE_FULL", Domain: "proxy.example"})
	if err != nil {
		t.Fatal(err)
	}
	client := dial(t, faking(t, &fake{ends: []error{ended.Err()}}))
	_, err = client.Generate(limited(t), &penstockv1.GenerateRequest{})
	var failed *penstock.Error
	if !errors.As(err, &failed) || failed.Reason != "" || failed.Retryable() || errors.Is(err, penstock.ErrQueueFull) {
		t.Errorf("%+v", err)
	}
}

func TestACallThatALeavingServerDroppedMayBeMadeAgain(t *testing.T) {
	dropped := status.Error(codes.Canceled, "")
	for name, test := range map[string]struct {
		fake      *fake
		retryable bool
	}{
		"before its answer began": {&fake{ends: []error{dropped, dropped}}, true},
		"later":                   {&fake{ends: []error{dropped, dropped}, first: true}, false},
	} {
		t.Run(name, func(t *testing.T) {
			client := dial(t, faking(t, test.fake))
			var last error
			for _, err := range client.Stream(limited(t), greedy(1)) {
				last = err
			}
			var failed *penstock.Error
			if !errors.As(last, &failed) || failed.Retryable() != test.retryable {
				t.Errorf("%+v", last)
			}
		})
	}
	client := dial(t, faking(t, &fake{ends: []error{dropped}}))
	_, err := client.Generate(limited(t), &penstockv1.GenerateRequest{})
	var failed *penstock.Error
	if !errors.As(err, &failed) || !failed.Retryable() {
		t.Errorf("%+v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = client.Generate(ctx, &penstockv1.GenerateRequest{})
	if !errors.As(err, &failed) || failed.Retryable() {
		t.Errorf("what the caller has cancelled: %+v", err)
	}
	closed, err := penstock.Dial("127.0.0.1:1")
	if err == nil {
		err = closed.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = closed.Generate(limited(t), &penstockv1.GenerateRequest{})
	if !errors.As(err, &failed) || failed.Retryable() {
		t.Errorf("on a closed connection: %+v", err)
	}
}
