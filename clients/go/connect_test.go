package penstock_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

// cert is the path of one of the certificates that the service's own tests use.
func cert(name string) string {
	return filepath.Join(root(), "tests", "service", "certs", name)
}

func load(t *testing.T, client *penstock.Client) error {
	t.Helper()
	_, err := client.Control.GetLoad(limited(t), &penstockv1.GetLoadRequest{})
	return err
}

// added makes a key, and returns it.
func added(t *testing.T, name, file string) string {
	t.Helper()
	cmd := command("keys", "add", name, "--file", file)
	cmd.Stderr = os.Stderr
	output, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(output))
}

func TestTLSAndKeys(t *testing.T) {
	t.Parallel()
	keys := filepath.Join(t.TempDir(), "keys.json")
	key := added(t, "alice", keys)
	server := started(t, "--tls-cert", cert("server.pem"), "--tls-key", cert("server.key"), "--keys", keys, "--grace", "0")
	trusted := penstock.WithTLS(penstock.TLS{CAFile: cert("ca.pem")})

	if err := load(t, dial(t, server.addr, trusted, penstock.WithKey(key))); err != nil {
		t.Errorf("with the key: %v", err)
	}
	if err := load(t, dial(t, server.addr, trusted)); !errors.Is(err, penstock.ErrUnauthenticated) {
		t.Errorf("without a key: %v", err)
	}
	if err := load(t, dial(t, server.addr, trusted, penstock.WithKey(key+"x"))); !errors.Is(err, penstock.ErrUnauthenticated) {
		t.Errorf("with another key: %v", err)
	}
	client := dial(t, server.addr, trusted, penstock.WithKey(key))
	if _, err := client.Control.Pause(limited(t), &penstockv1.PauseRequest{}); !errors.Is(err, penstock.ErrForbidden) {
		t.Errorf("what the key has no role for: %v", err)
	}
	other := penstock.WithTLS(penstock.TLS{CAFile: cert("other_ca.pem")})
	if err := load(t, dial(t, server.addr, other, penstock.WithKey(key), penstock.WithoutRetries())); status.Code(err) != codes.Unavailable {
		t.Errorf("a server of another authority: %v", err)
	}
	misnamed := penstock.WithTLS(penstock.TLS{CAFile: cert("ca.pem"), ServerName: "elsewhere.example"})
	if err := load(t, dial(t, server.addr, misnamed, penstock.WithoutRetries())); status.Code(err) != codes.Unavailable {
		t.Errorf("a server of another name: %v", err)
	}
	if err := load(t, dial(t, server.addr, penstock.WithoutRetries())); status.Code(err) != codes.Unavailable {
		t.Errorf("without TLS: %v", err)
	}
}

func TestClientCertificates(t *testing.T) {
	t.Parallel()
	server := started(t, "--tls-cert", cert("server.pem"), "--tls-key", cert("server.key"), "--client-ca", cert("ca.pem"),
		"--grace", "0")
	shown := func(name string) penstock.Option {
		return penstock.WithTLS(penstock.TLS{CAFile: cert("ca.pem"), CertFile: cert(name + ".pem"), KeyFile: cert(name + ".key")})
	}
	if err := load(t, dial(t, server.addr, shown("client"))); err != nil {
		t.Errorf("with a certificate: %v", err)
	}
	none := penstock.WithTLS(penstock.TLS{CAFile: cert("ca.pem")})
	if err := load(t, dial(t, server.addr, none, penstock.WithoutRetries())); status.Code(err) != codes.Unavailable {
		t.Errorf("without a certificate: %v", err)
	}
	if err := load(t, dial(t, server.addr, shown("stranger"), penstock.WithoutRetries())); status.Code(err) != codes.Unavailable {
		t.Errorf("with a certificate of another authority: %v", err)
	}
}

func TestAUnixSocket(t *testing.T) {
	// A key may go to a socket without TLS: it does not leave the machine.
	if err := load(t, dial(t, "unix:"+demo.socket, penstock.WithKey("any"))); err != nil {
		t.Error(err)
	}
}

func TestAllAddressesOfAName(t *testing.T) {
	_, port, _ := strings.Cut(demo.addr, ":")
	client := dial(t, "dns:///localhost:"+port)
	if err := load(t, client); err != nil {
		t.Error(err)
	}
	begin := &penstockv1.UpdateWeightsBegin{VersionLabel: "x", ValidateOnly: true}
	if _, err := client.UpdateWeights(limited(t), begin, demoWeights()); err == nil || !strings.Contains(err.Error(), "several servers") {
		t.Errorf("one of several servers was updated: %v", err)
	}
}

func TestWaitingUntilAServerIsReady(t *testing.T) {
	if err := dial(t, demo.addr).WaitReady(limited(t)); err != nil {
		t.Error(err)
	}
	nobody := dial(t, "unix:"+filepath.Join(t.TempDir(), "nobody.sock"))
	// On a busy machine it may take a while until it is known that nobody is there.
	for patience := 200 * time.Millisecond; ; patience *= 4 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		err := nobody.WaitReady(ctx)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if strings.Contains(err.Error(), "nobody.sock: ") {
			break
		}
		if patience > waitLimit {
			t.Fatalf("it does not say why: %v", err)
		}
	}
	closed := must[*penstock.Client](t)(penstock.Dial(demo.addr))
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	var failed *penstock.Error
	if err := closed.WaitReady(limited(t)); !errors.As(err, &failed) || failed.Code != codes.Canceled {
		t.Errorf("on a closed connection: %v", err)
	}
}

func TestWhatCannotBeDialled(t *testing.T) {
	noPEM := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(noPEM, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		addr    string
		options []penstock.Option
		says    string
	}{
		"no address":          {addr: "", says: "HOST:PORT"},
		"a space":             {addr: " localhost:1", says: "HOST:PORT"},
		"a URL":               {addr: "http://localhost:50051", says: "HOST:PORT"},
		"a URL of TLS":        {addr: "https://localhost:50051", says: "HOST:PORT"},
		"a path":              {addr: "localhost:50051/path", says: "HOST:PORT"},
		"a space in the name": {addr: "a b:50051", says: "HOST:PORT"},
		"a port that is none": {addr: "localhost:http", says: "HOST:PORT"},
		"a port that is 0":    {addr: "localhost:0", says: "HOST:PORT"},
		"a large port":        {addr: "localhost:65536", says: "HOST:PORT"},
		"an empty port":       {addr: "localhost:", says: "HOST:PORT"},
		"an empty host":       {addr: ":50051", says: "HOST:PORT"},
		"two ports":           {addr: "localhost:1:2", says: "HOST:PORT"},
		"half a bracket":      {addr: "[::1", says: "HOST:PORT"},
		"no path":             {addr: "unix:", says: "HOST:PORT"},
		"no name":             {addr: "dns:///", says: "HOST:PORT"},
		"no credentials": {
			addr: "localhost", options: []penstock.Option{penstock.WithTransportCredentials(nil)}, says: "are nil",
		},
		"two servers":        {addr: "localhost:1,localhost:2", says: "HOST:PORT"},
		"a key in plaintext": {addr: "models.example:50051", options: []penstock.Option{penstock.WithKey("k")}, says: "plaintext"},
		"a key in plaintext to a name of many": {
			addr: "dns:///localhost:50051", options: []penstock.Option{penstock.WithKey("k")}, says: "plaintext",
		},
		"a key of two words": {addr: "localhost", options: []penstock.Option{penstock.WithKey("a b")}, says: "one word"},
		"no key":             {addr: "localhost", options: []penstock.Option{penstock.WithKey("")}, says: "empty"},
		"no authorities": {
			addr: "localhost", options: []penstock.Option{penstock.WithTLS(penstock.TLS{CAFile: noPEM})}, says: "no PEM certificates",
		},
		"no file": {
			addr:    "localhost",
			options: []penstock.Option{penstock.WithTLS(penstock.TLS{CAFile: noPEM + "x"})}, says: "no such file",
		},
		"half a pair": {
			addr: "localhost", options: []penstock.Option{penstock.WithTLS(penstock.TLS{CertFile: noPEM})}, says: "together",
		},
		"a key of another certificate": {
			addr: "localhost",
			options: []penstock.Option{penstock.WithTLS(penstock.TLS{
				CertFile: cert("client.pem"), KeyFile: cert("server.key"),
			})},
			says: "not a PEM certificate and its key",
		},
		"two ways to secure it": {
			addr: "localhost",
			options: []penstock.Option{
				penstock.WithTLS(penstock.TLS{}), penstock.WithTransportCredentials(insecure.NewCredentials()),
			},
			says: "only one of them",
		},
		"no room for a message": {addr: "localhost", options: []penstock.Option{penstock.WithMaxMessageBytes(0)}, says: "at least 1"},
		"no time for a ping":    {addr: "localhost", options: []penstock.Option{penstock.WithKeepalive(0, time.Second)}, says: "above 0"},
	} {
		t.Run(name, func(t *testing.T) {
			client, err := penstock.Dial(test.addr, test.options...)
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, %v", client, err)
			}
		})
	}
	allowed := dial(t, "models.example:50051", penstock.WithKey("k"), penstock.AllowPlaintextKey())
	if got := allowed.Conn().Target(); got != "models.example:50051" {
		t.Error(got)
	}
	for addr, want := range map[string]string{
		"localhost": "localhost:50051", "::1": "[::1]:50051", "[::1]": "[::1]:50051", "[::1]:7": "[::1]:7", "10.1.2.3:7": "10.1.2.3:7",
		"unix:/run/x.sock": "unix:/run/x.sock", "unix:x.sock": "unix:x.sock",
		"dns:///models.example:7": "dns:///models.example:7", "passthrough:///x:7": "passthrough:///x:7",
	} {
		if got := dial(t, addr).Conn().Target(); got != want {
			t.Errorf("%s: %s", addr, got)
		}
	}
}
