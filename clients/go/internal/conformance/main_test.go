package main

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// outcomes runs cases against a server that knows nothing but health.
func outcomes(t *testing.T, cases string) (string, error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	healthpb.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	path := filepath.Join(t.TempDir(), "cases.json")
	if err := os.WriteFile(path, []byte(cases), 0o600); err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	err = run(listener.Addr().String(), path, &lines)
	return lines.String(), err
}

func TestEachCaseIsALine(t *testing.T) {
	lines, err := outcomes(t, `[
		{"name": "one", "method": "grpc.health.v1.Health/Check", "requests": [{}], "expect": {}},
		{"name": "<two>", "method": "grpc.health.v1.Health/Check", "requests": [{"service": "unknown"}]},
		{"name": "three", "method": "grpc.health.v1.Health/Watch", "requests": [{}], "timeout_s": 0.3},
		{"name": "four", "method": "penstock.v1.InferenceService/UpdateWeights", "requests": [{"begin": {}}, {"commit": {}}]}
	]`)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"name":"one","messages":[{"status":"SERVING"}],"status":{"code":"OK","message":"","details":[]}}
{"name":"<two>","messages":[],"status":{"code":"NOT_FOUND","message":"unknown service","details":[]}}
{"name":"three","messages":[{"status":"SERVING"}],"status":{"code":"DEADLINE_EXCEEDED","message":"context deadline exceeded","details":[]}}
{"name":"four","messages":[],"status":{"code":"UNIMPLEMENTED","message":"unknown service penstock.v1.InferenceService","details":[]}}
`
	if lines != want {
		t.Errorf("%s\nis not\n%s", lines, want)
	}
	for line := range strings.Lines(lines) {
		if !json.Valid([]byte(line)) {
			t.Error(line)
		}
	}
}

func TestACaseThatIsWrongIsNamed(t *testing.T) {
	for cases, says := range map[string]string{
		`{}`: "cannot unmarshal",
		`[{"name": "a", "method": "penstock.v1.InferenceService/Gone"}]`:                                `the case "a": no method`,
		`[{"name": "b", "method": "penstock.v1.Gone/Generate"}]`:                                        `the case "b": no service`,
		`[{"name": "c", "method": "penstock.v1.InferenceService/Generate", "requests": [{"gone": 1}]}]`: `the case "c"`,
	} {
		if lines, err := outcomes(t, cases); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %s%v", cases, lines, err)
		}
	}
}
