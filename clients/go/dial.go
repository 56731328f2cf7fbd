// Package penstock calls Penstock servers: language models over gRPC.
//
// [Dial] makes a [Client]. Its fields Inference and Control are the generated stubs, so all of the contract can be
// called; its methods are for what takes more than one call of a stub: streams as iterators, weights of a safetensors
// file, waiting until a server is ready. Every error of a call is an [*Error], whether a stub or a method made the call.
//
// The messages are in the package penstock/clients/go/penstockv1, whose comments say what each field means.
package penstock

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // so that calls to several servers leave out those that are not SERVING
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"penstock/clients/go/penstockv1"
)

const (
	// DefaultPort is the port of an address that has none.
	DefaultPort = "50051"
	// DefaultMaxMessageBytes is the size of the largest message that a client sends or receives. gRPC's own limit of
	// 4 MiB is too small for the log-probabilities of a long prompt.
	DefaultMaxMessageBytes = 64 << 20
	// DefaultKeepalive is how long a connection on which a call runs may be silent before the client sends a ping. A
	// long prefill sends nothing for a while, so only the answer to a ping tells a quiet connection from a dead one.
	DefaultKeepalive = 30 * time.Second
	// DefaultKeepaliveTimeout is how long the client waits for the answer to a ping before the connection counts as
	// dead, which ends its calls with [codes.Unavailable].
	DefaultKeepaliveTimeout = 10 * time.Second
)

// Client is a connection to a server, or to several that serve the same. It may be used by many goroutines at once.
type Client struct {
	// Inference is the stub of penstock.v1.InferenceService.
	Inference penstockv1.InferenceServiceClient
	// Control is the stub of penstock.v1.ControlService. It needs a client of its own where the server has an address
	// of its own for control.
	Control penstockv1.ControlServiceClient
	// Health is the stub of grpc.health.v1.Health.
	Health healthpb.HealthClient

	conn      *grpc.ClientConn
	balanced  bool // whether calls go to several servers in turn
	chunkRoom int  // the most bytes of a tensor that a message has room for
}

// Dial makes a client. It does not connect: the first call does, or [Client.WaitReady].
//
// The address is HOST:PORT, unix:/PATH, or dns:///NAME:PORT for all addresses of a name, which are called in turn as
// long as their health is SERVING. Without [WithTLS] nothing is encrypted.
//
// Dial returns an error for what is no address, for options that contradict each other, files that cannot be used, and a key that others
// could read on the network.
func Dial(addr string, options ...Option) (*Client, error) {
	chosen := settings{
		maxMessageBytes: DefaultMaxMessageBytes,
		keepalive:       keepalive.ClientParameters{Time: DefaultKeepalive, Timeout: DefaultKeepaliveTimeout},
		retries:         true,
	}
	for _, option := range options {
		if err := option(&chosen); err != nil {
			return nil, fmt.Errorf("penstock: %w", err)
		}
	}
	to, err := target(addr)
	if err != nil {
		return nil, fmt.Errorf("penstock: %w", err)
	}
	dialing, err := chosen.dialOptions(to)
	if err != nil {
		return nil, fmt.Errorf("penstock: %w", err)
	}
	conn, err := grpc.NewClient(to, dialing...)
	if err != nil {
		return nil, fmt.Errorf("penstock: %s: %w", addr, err)
	}
	return &Client{
		Inference: penstockv1.NewInferenceServiceClient(conn),
		Control:   penstockv1.NewControlServiceClient(conn),
		Health:    healthpb.NewHealthClient(conn),
		conn:      conn,
		chunkRoom: max(chosen.maxMessageBytes-chunkOverheadBytes, 1),
		balanced:  isBalanced(to),
	}, nil
}

// Conn returns the connection, for stubs of other services. Their errors are [*Error] as well.
func (c *Client) Conn() *grpc.ClientConn { return c.conn }

// Close ends the connection, and with it all running calls.
func (c *Client) Close() error { return c.conn.Close() }

func (s *settings) dialOptions(addr string) ([]grpc.DialOption, error) {
	secure := s.credentials
	if secure == nil {
		secure = insecure.NewCredentials()
	}
	found := []grpc.DialOption{
		grpc.WithTransportCredentials(secure),
		grpc.WithKeepaliveParams(s.keepalive),
		grpc.WithDefaultServiceConfig(serviceConfig(s.retries, isBalanced(addr))),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(s.maxMessageBytes), grpc.MaxCallSendMsgSize(s.maxMessageBytes)),
		// By default gRPC waits up to two minutes before it connects again, and would find a server that has just
		// started late.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 20 * time.Second,
		}),
		grpc.WithChainUnaryInterceptor(typedUnary),
		grpc.WithChainStreamInterceptor(typedStream),
	}
	if s.key != "" {
		if s.credentials == nil && !s.plaintextKey && !isLocal(addr) {
			return nil, fmt.Errorf("the key would be sent to %s in plaintext, readable for others on the network; "+
				"use WithTLS, or allow it with AllowPlaintextKey", addr)
		}
		found = append(found, grpc.WithPerRPCCredentials(bearer{s.key, s.credentials != nil}))
	}
	return append(found, s.more...), nil
}

// serviceConfig says that only UNAVAILABLE is tried again, and only before anything of the answer has come. The server
// did not take such a call, or its connection broke. gRPC waits for what the server asks for in the trailer
// grpc-retry-pushback-ms, else for a random part of the backoff. A health check is not tried again: who asks wants to
// know how it is now, and why.
func serviceConfig(retries, balanced bool) string {
	var parts []string
	if retries {
		parts = append(parts, `"methodConfig": [{"name": [{}], "retryPolicy": {
			"maxAttempts": 5, "initialBackoff": "0.5s", "maxBackoff": "30s", "backoffMultiplier": 2,
			"retryableStatusCodes": ["UNAVAILABLE"]}}, {"name": [{"service": "grpc.health.v1.Health"}]}]`)
	}
	if balanced {
		parts = append(parts, `"loadBalancingConfig": [{"round_robin": {}}],
			"healthCheckConfig": {"serviceName": "`+servingService+`"}`)
	}
	return "{" + strings.Join(parts, ", ") + "}"
}

// target is the address in gRPC's form, with a port: gRPC would use 443. It returns an error for what is no address,
// which gRPC would take for the name of a host that nobody has.
func target(addr string) (string, error) {
	wrong := fmt.Errorf("an address must be HOST:PORT, unix:/PATH or dns:///NAME:PORT, not %q", addr)
	if strings.ContainsAny(addr, " \t\r\n") || strings.HasPrefix(addr, "http://") || strings.HasPrefix(addr, "https://") {
		return "", wrong
	}
	if scheme, rest, ok := strings.Cut(addr, ":"); ok && hasScheme(addr) {
		if scheme == "" || strings.Trim(rest, "/") == "" {
			return "", wrong
		}
		return addr, nil
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		host, port = strings.Trim(addr, "[]"), DefaultPort
		if strings.Contains(host, ":") && !isIPv6(host) || strings.HasPrefix(addr, "[") != strings.HasSuffix(addr, "]") {
			return "", wrong
		}
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || number == 0 || host == "" || strings.ContainsAny(host, "/[]@,") {
		return "", wrong
	}
	return net.JoinHostPort(host, port), nil
}

func isIPv6(host string) bool {
	address, err := netip.ParseAddr(host)
	return err == nil && address.Is6()
}

// isBalanced says whether calls go to all addresses of a name, in turn.
func isBalanced(target string) bool { return strings.HasPrefix(target, "dns:///") }

func hasScheme(addr string) bool {
	return strings.Contains(addr, "://") || isSocket(addr) || strings.HasPrefix(addr, "dns:")
}

func isSocket(addr string) bool {
	return strings.HasPrefix(addr, "unix:") || strings.HasPrefix(addr, "unix-abstract:")
}

// isLocal says whether what is sent to the target stays on this machine.
func isLocal(target string) bool {
	if hasScheme(target) {
		return isSocket(target)
	}
	host, _, err := net.SplitHostPort(target)
	ip := net.ParseIP(host)
	return err == nil && (strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback())
}

var errTwoCredentials = errors.New("WithTLS and WithTransportCredentials both secure the connection; use only one of them")

type settings struct {
	credentials     credentials.TransportCredentials // nil means plaintext
	key             string
	plaintextKey    bool
	maxMessageBytes int
	keepalive       keepalive.ClientParameters
	retries         bool
	more            []grpc.DialOption
}
