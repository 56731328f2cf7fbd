package penstock_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

// fake is a server that ends its first calls with these errors, one after the other, and answers the others.
type fake struct {
	penstockv1.UnimplementedInferenceServiceServer
	mutex sync.Mutex
	ends  []error
	calls int
	text  string // of the answers
	first bool   // whether a stream sends a message before it ends
}

func (f *fake) next() error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.calls++
	if f.calls <= len(f.ends) {
		return f.ends[f.calls-1]
	}
	return nil
}

func (f *fake) count() int {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	return f.calls
}

func (f *fake) Generate(ctx context.Context, _ *penstockv1.GenerateRequest) (*penstockv1.GenerateResponse, error) {
	if err := f.next(); err != nil {
		_ = grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", "1"))
		return nil, err
	}
	return &penstockv1.GenerateResponse{Outputs: []*penstockv1.Output{{Text: f.text}}}, nil
}

func (f *fake) Stream(_ *penstockv1.StreamRequest, to grpc.ServerStreamingServer[penstockv1.StreamResponse]) error {
	end := f.next()
	if f.first || end == nil {
		if err := to.Send(&penstockv1.StreamResponse{}); err != nil {
			return err
		}
	}
	if end != nil {
		to.SetTrailer(metadata.Pairs("grpc-retry-pushback-ms", "1"))
	}
	return end
}

// faking serves a fake, and gives its address.
func faking(t *testing.T, service *fake) string {
	t.Helper()
	return served(t, func(to *grpc.Server) { penstockv1.RegisterInferenceServiceServer(to, service) })
}

// served starts a server in this process, and gives its address.
func served(t *testing.T, register func(*grpc.Server)) string {
	t.Helper()
	listener := must[net.Listener](t)(net.Listen("tcp", "127.0.0.1:0"))
	grpcServer := grpc.NewServer()
	register(grpcServer)
	go func() { _ = grpcServer.Serve(listener) }()
	t.Cleanup(grpcServer.Stop)
	return listener.Addr().String()
}

func refused(t *testing.T, code codes.Code, reason penstock.Reason) error {
	t.Helper()
	ended, err := status.New(code, "refused").WithDetails(
		&errdetails.ErrorInfo{Reason: string(reason), Domain: "penstock"},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(2500 * time.Millisecond)})
	if err != nil {
		t.Fatal(err)
	}
	return ended.Err()
}

func TestOnlyWhatTheServerDidNotTakeIsTriedAgain(t *testing.T) {
	draining := refused(t, codes.Unavailable, penstock.ErrDraining)
	full := refused(t, codes.ResourceExhausted, penstock.ErrQueueFull)
	bug := status.Error(codes.Internal, "a bug")
	for name, test := range map[string]struct {
		fake    *fake
		options []penstock.Option
		stream  bool
		calls   int
		code    codes.Code
	}{
		"taken at once":        {fake: &fake{}, calls: 1, code: codes.OK},
		"unavailable twice":    {fake: &fake{ends: []error{draining, draining}}, calls: 3, code: codes.OK},
		"a stream, once":       {fake: &fake{ends: []error{draining}}, stream: true, calls: 2, code: codes.OK},
		"unavailable for ever": {fake: &fake{ends: []error{draining, draining, draining, draining, draining}}, calls: 5, code: codes.Unavailable},
		"a full queue":         {fake: &fake{ends: []error{full}}, calls: 1, code: codes.ResourceExhausted},
		"a bug":                {fake: &fake{ends: []error{bug}}, calls: 1, code: codes.Internal},
		"after the answer began": {
			fake: &fake{ends: []error{draining}, first: true}, stream: true, calls: 1, code: codes.Unavailable,
		},
		"without retries": {
			fake: &fake{ends: []error{draining}}, options: []penstock.Option{penstock.WithoutRetries()},
			calls: 1, code: codes.Unavailable,
		},
	} {
		t.Run(name, func(t *testing.T) {
			client := dial(t, faking(t, test.fake), test.options...)
			var err error
			if test.stream {
				for _, err = range client.Stream(limited(t), greedy(1)) {
				}
			} else {
				_, err = client.Generate(limited(t), &penstockv1.GenerateRequest{})
			}
			if status.Code(err) != test.code || test.fake.count() != test.calls {
				t.Errorf("%d calls, then %v", test.fake.count(), err)
			}
		})
	}
}

func TestARefusalSaysWhenToComeBack(t *testing.T) {
	busy := refused(t, codes.ResourceExhausted, penstock.ErrBusy)
	client := dial(t, faking(t, &fake{ends: []error{busy}}))
	_, err := client.Generate(limited(t), &penstockv1.GenerateRequest{})
	failed, ok := err.(*penstock.Error)
	if !ok || failed.RetryAfter != 2500*time.Millisecond || !failed.Retryable() {
		t.Errorf("%+v", err)
	}
	if failed.Error() != "ResourceExhausted (BUSY): refused" {
		t.Error(failed)
	}
}

func TestAnswersMayBeLargerThanWhatGRPCTakesByDefault(t *testing.T) {
	client := dial(t, faking(t, &fake{text: strings.Repeat("x", 5<<20)}))
	reply, err := client.Generate(limited(t), &penstockv1.GenerateRequest{})
	if err != nil || len(reply.Outputs[0].Text) != 5<<20 {
		t.Error(err)
	}
}

func TestAServerOfSeveralThatIsNotServingIsNotCalled(t *testing.T) {
	service := &fake{}
	told := health.NewServer()
	told.SetServingStatus("penstock.v1.InferenceService", healthpb.HealthCheckResponse_NOT_SERVING)
	addr := served(t, func(to *grpc.Server) {
		penstockv1.RegisterInferenceServiceServer(to, service)
		healthpb.RegisterHealthServer(to, told)
	})
	_, port, _ := strings.Cut(addr, ":")
	client := dial(t, "dns:///localhost:"+port, penstock.WithoutRetries())
	_, err := client.Generate(limited(t), &penstockv1.GenerateRequest{})
	if status.Code(err) != codes.Unavailable || service.count() != 0 {
		t.Errorf("%d calls, %v", service.count(), err)
	}
	told.SetServingStatus("penstock.v1.InferenceService", healthpb.HealthCheckResponse_SERVING)
	until(t, "it is called", func() bool {
		_, err := client.Generate(limited(t), &penstockv1.GenerateRequest{})
		return err == nil
	})
}

// taker is a server that takes weights in small chunks, and notes what it is sent.
type taker struct {
	penstockv1.UnimplementedInferenceServiceServer
	penstockv1.UnimplementedControlServiceServer
	steps []*penstockv1.UpdateWeightsRequest
}

func (*taker) GetServerInfo(context.Context, *penstockv1.GetServerInfoRequest) (*penstockv1.GetServerInfoResponse, error) {
	return &penstockv1.GetServerInfoResponse{MaxChunkBytes: 4}, nil
}

func (f *taker) UpdateWeights(
	from grpc.ClientStreamingServer[penstockv1.UpdateWeightsRequest, penstockv1.UpdateWeightsResponse],
) error {
	for {
		step, err := from.Recv()
		if err == io.EOF {
			return from.SendAndClose(&penstockv1.UpdateWeightsResponse{})
		}
		if err != nil {
			return err
		}
		f.steps = append(f.steps, step)
	}
}

func TestAnUpdateIsSentInChunks(t *testing.T) {
	service := &taker{}
	addr := served(t, func(to *grpc.Server) {
		penstockv1.RegisterInferenceServiceServer(to, service)
		penstockv1.RegisterControlServiceServer(to, service)
	})
	tensor := func(name string, dtype penstockv1.DataType, data string, shape ...uint64) penstock.Tensor {
		return penstock.Tensor{Name: name, DType: dtype, Shape: shape, Data: strings.NewReader(data)}
	}
	_, err := dial(t, addr).UpdateWeightsFromTensors(
		limited(t), &penstockv1.UpdateWeightsBegin{VersionLabel: "x"}, []penstock.Tensor{
			tensor("long", penstockv1.DataType_DATA_TYPE_I8, "123456789", 3, 3),
			tensor("empty", penstockv1.DataType_DATA_TYPE_F32, "", 0),
			tensor("odd", penstockv1.DataType_DATA_TYPE_I4, "ab", 3), // two values share a byte
		})
	if err != nil {
		t.Fatal(err)
	}
	// The CRC32C of "123456789" is the one that every definition of it gives as its check value.
	if long := service.steps[0].GetBegin().GetManifest().GetTensors()[0]; long.Crc32C != 0xe3069283 {
		t.Error(long)
	}
	var told []string
	for _, step := range service.steps[1:] {
		if chunk := step.GetChunk(); chunk != nil {
			told = append(told, fmt.Sprintf("%d@%d %s", chunk.TensorIndex, chunk.Offset, chunk.Data))
		} else {
			told = append(told, fmt.Sprint("commit ", step.GetCommit().GetTotalBytes()))
		}
	}
	want := "0@0 1234, 0@4 5678, 0@8 9, 2@0 ab, commit 11"
	if got := strings.Join(told, ", "); got != want {
		t.Errorf("%s\nis not\n%s", got, want)
	}
}
