// Conformance makes the calls of a file of cases, and prints what came of each as a line of JSON. tests/conformance
// compares these lines with those of the other languages' clients, and with the table of what is right.
//
//	go run ./internal/conformance --addr 127.0.0.1:50051 --cases ../../tests/conformance/cases/stream.json
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	_ "google.golang.org/grpc/reflection/grpc_reflection_v1" // known by their names below
	_ "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	penstock "penstock/clients/go"
)

// testCase is one entry of a file of cases; what it expects is compared elsewhere.
type testCase struct {
	Name     string            `json:"name"`
	Method   string            `json:"method"`
	Requests []json.RawMessage `json:"requests"`
	Metadata map[string]string `json:"metadata"`
	TimeoutS float64           `json:"timeout_s"`
}

// outcome is a line of the output.
type outcome struct {
	Name     string            `json:"name"`
	Messages []json.RawMessage `json:"messages"`
	Status   ending            `json:"status"`
}

type ending struct {
	Code    string            `json:"code"`
	Message string            `json:"message"`
	Details []json.RawMessage `json:"details"`
}

// defaultTimeout ends a call that would never end; a case that needs another time says so.
const defaultTimeout = 60 * time.Second

func main() {
	addr := flag.String("addr", "127.0.0.1:50051", "address of the server")
	cases := flag.String("cases", "", "file of cases")
	flag.Parse()
	if err := run(*addr, *cases, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

func run(addr, path string, to io.Writer) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var cases []testCase
	if err := json.Unmarshal(data, &cases); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	client, err := penstock.Dial(addr, penstock.WithoutRetries())
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // all calls have ended
	lines := json.NewEncoder(to)          // each line leaves at once
	lines.SetEscapeHTML(false)
	for _, one := range cases {
		found, err := call(client.Conn(), one)
		if err != nil {
			return fmt.Errorf("the case %q: %w", one.Name, err)
		}
		if err := lines.Encode(found); err != nil {
			return err
		}
	}
	return nil
}

// call makes one call. An error says that the case itself is at fault; what the server says is in the outcome.
func call(conn *grpc.ClientConn, one testCase) (*outcome, error) {
	method, err := methodOf(one.Method)
	if err != nil {
		return nil, err
	}
	requests, err := requestsOf(one, method)
	if err != nil {
		return nil, err
	}
	timeout := defaultTimeout
	if one.TimeoutS > 0 {
		timeout = time.Duration(one.TimeoutS * float64(time.Second))
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	ctx = metadata.NewOutgoingContext(ctx, metadata.New(one.Metadata))

	found := &outcome{Name: one.Name, Messages: []json.RawMessage{}}
	desc := &grpc.StreamDesc{ClientStreams: method.IsStreamingClient(), ServerStreams: method.IsStreamingServer()}
	stream, err := conn.NewStream(ctx, desc, "/"+one.Method)
	if err == nil {
		err = exchange(stream, requests, method, found)
	}
	found.Status, err = endingOf(err)
	return found, err
}

// exchange sends the requests and gathers the replies. It returns the error that ended the call, or nil for OK.
func exchange(stream grpc.ClientStream, requests []proto.Message, method protoreflect.MethodDescriptor, found *outcome) error {
	for _, request := range requests {
		if err := stream.SendMsg(request); err == io.EOF {
			break // the call has ended already; receiving says how
		} else if err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	kind, err := protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName())
	if err != nil {
		return err
	}
	for {
		reply := kind.New().Interface()
		if err := stream.RecvMsg(reply); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		text, err := protojson.Marshal(reply)
		if err != nil {
			return err
		}
		found.Messages = append(found.Messages, text)
		if !method.IsStreamingServer() {
			return nil // gRPC has waited for the status before it gave the only reply
		}
	}
}

func methodOf(path string) (protoreflect.MethodDescriptor, error) {
	service, name, _ := strings.Cut(path, "/")
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service))
	if err != nil {
		return nil, fmt.Errorf("no service %q: %w", service, err)
	}
	if known, ok := found.(protoreflect.ServiceDescriptor); ok {
		if method := known.Methods().ByName(protoreflect.Name(name)); method != nil {
			return method, nil
		}
	}
	return nil, fmt.Errorf("no method %q", path)
}

func requestsOf(one testCase, method protoreflect.MethodDescriptor) ([]proto.Message, error) {
	kind, err := protoregistry.GlobalTypes.FindMessageByName(method.Input().FullName())
	if err != nil {
		return nil, err
	}
	var found []proto.Message
	for _, text := range one.Requests {
		request := kind.New().Interface()
		if err := protojson.Unmarshal(text, request); err != nil {
			return nil, err
		}
		found = append(found, request)
	}
	return found, nil
}

// statusNames are the names that gRPC's specification has; Go's own differ ("InvalidArgument").
var statusNames = []string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
	"INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

func endingOf(err error) (ending, error) {
	if _, ok := status.FromError(err); !ok {
		return ending{}, err // not an answer, but a fault of this program or its case
	}
	found := status.Convert(err)
	name := found.Code().String()
	if int(found.Code()) < len(statusNames) {
		name = statusNames[found.Code()]
	}
	end := ending{Code: name, Message: found.Message(), Details: []json.RawMessage{}}
	for _, detail := range found.Proto().GetDetails() {
		text, err := protojson.Marshal(detail)
		if err != nil {
			return ending{}, err
		}
		end.Details = append(end.Details, text)
	}
	return end, nil
}
