package penstock_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

const (
	// startLimit is for a machine that has compiled nothing yet and has other things to do.
	startLimit = 5 * time.Minute
	waitLimit  = time.Minute
)

// demo is a server of the demo model that most tests share.
var demo *server

func TestMain(m *testing.M) {
	os.Exit(func() int {
		folder, err := os.MkdirTemp("", "penstock-go-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() { _ = os.RemoveAll(folder) }()
		demo, err = launch("--grace", "0", "--profile-dir", filepath.Join(folder, "profiles"),
			"--unix-socket", filepath.Join(folder, "demo.sock"))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		demo.socket = filepath.Join(folder, "demo.sock")
		defer demo.end()
		return m.Run()
	}())
}

// server is `penstock serve demo` in a process of its own.
type server struct {
	addr   string
	socket string
	cmd    *exec.Cmd
	ended  chan struct{} // closed when the process has ended
}

var readyLine = regexp.MustCompile(`ready on (\d\S+)`)

// root is the repository's folder.
func root() string {
	path, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		panic(err)
	}
	return path
}

// command is the command line of Penstock: PENSTOCK_COMMAND, else that of the repository's virtual environment.
func command(arguments ...string) *exec.Cmd {
	words := strings.Fields(os.Getenv("PENSTOCK_COMMAND"))
	if len(words) == 0 {
		words = []string{filepath.Join(root(), ".venv", "bin", "python"), "-m", "penstock.cli"}
	}
	cmd := exec.Command(words[0], append(words[1:], arguments...)...)
	cmd.Dir = root()
	cmd.Env = append(os.Environ(), "PYTHONUNBUFFERED=1")
	return cmd
}

// launch starts a server, and returns when it is ready.
func launch(flags ...string) (*server, error) {
	cache := os.Getenv("PENSTOCK_TEST_CACHE")
	if cache == "" {
		cache = filepath.Join(os.TempDir(), "penstock-tests-xla")
	}
	cmd := command(append([]string{"serve", "demo", "--port", "0", "--compilation-cache", cache}, flags...)...)
	output, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	found := &server{cmd: cmd, ended: make(chan struct{})}
	slow := time.AfterFunc(startLimit, func() { _ = cmd.Process.Kill() })
	ready := make(chan string, 1)
	var said bytes.Buffer
	go func() {
		lines := bufio.NewScanner(output)
		for told := false; lines.Scan(); {
			if told {
				continue // but read, or else its pipe would fill
			}
			said.WriteString(lines.Text() + "\n")
			if match := readyLine.FindStringSubmatch(lines.Text()); match != nil {
				told = true
				ready <- match[1]
			}
		}
		_ = cmd.Wait()
		close(found.ended)
	}()
	select {
	case found.addr = <-ready:
		slow.Stop()
		return found, nil
	case <-found.ended:
		return nil, fmt.Errorf("the server did not start:\n%s", said.String())
	}
}

// end lets the server stop, and waits until it has.
func (s *server) end() {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.ended:
	case <-time.After(waitLimit):
		_ = s.cmd.Process.Kill()
		<-s.ended
	}
}

// started is a server for one test.
func started(t *testing.T, flags ...string) *server {
	t.Helper()
	found, err := launch(flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(found.end)
	return found
}

func dial(t *testing.T, addr string, options ...penstock.Option) *penstock.Client {
	t.Helper()
	client, err := penstock.Dial(addr, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	return client
}

func limited(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	t.Cleanup(cancel)
	return ctx
}

// until waits for a condition.
func until(t *testing.T, what string, met func() bool) {
	t.Helper()
	for end := time.Now().Add(waitLimit); !met(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s", what, waitLimit)
		}
	}
}

func must[T any](t *testing.T) func(T, error) T {
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

// unique makes an id that no test has used at this server.
func unique(name string) string { return fmt.Sprintf("%s-%d", name, time.Now().UnixNano()) }

func ptr[T any](value T) *T { return &value }

// greedy is a request whose tokens are always the same.
func greedy(tokens uint32) *penstockv1.StreamRequest {
	return &penstockv1.StreamRequest{
		Input:    &penstockv1.StreamRequest_Prompt{Prompt: "Once upon a time"},
		Sampling: &penstockv1.SamplingParams{Temperature: ptr(0.0)},
		Stopping: &penstockv1.StoppingParams{MaxTokens: &tokens, IgnoreEos: true},
	}
}

// long is a request of many outputs, of which only some run at a time.
func long(outputs uint32) *penstockv1.StreamRequest {
	request := greedy(500)
	request.Sampling.N = &outputs
	return request
}
