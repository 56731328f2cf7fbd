package penstock

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// Option changes how [Dial] reaches a server.
type Option func(*settings) error

// TLS says which servers a client trusts, and which certificate it shows. Files are in PEM form, and are read by
// [Dial].
type TLS struct {
	// CAFile has the authorities that the server's certificate must lead to. Empty: those that this machine trusts.
	CAFile string
	// CertFile is the client's own certificate, followed by those that lead to its authority, for a server that asks
	// for one (mTLS). KeyFile is its private key, without a password. Both or none.
	CertFile, KeyFile string
	// ServerName is the name in the server's certificate. Empty: the host of the address.
	ServerName string
}

// WithTLS encrypts the connection.
func WithTLS(files TLS) Option {
	return func(s *settings) error {
		if s.credentials != nil {
			return errTwoCredentials
		}
		config := &tls.Config{ServerName: files.ServerName, MinVersion: tls.VersionTLS12}
		if files.CAFile != "" {
			data, err := os.ReadFile(files.CAFile)
			if err != nil {
				return err
			}
			config.RootCAs = x509.NewCertPool()
			if !config.RootCAs.AppendCertsFromPEM(data) {
				return fmt.Errorf("%s holds no PEM certificates", files.CAFile)
			}
		}
		if (files.CertFile == "") != (files.KeyFile == "") {
			return errors.New("CertFile and KeyFile must be given together")
		}
		if files.CertFile != "" {
			pair, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
			if err != nil {
				return fmt.Errorf("%s and %s are not a PEM certificate and its key: %w", files.CertFile, files.KeyFile, err)
			}
			config.Certificates = []tls.Certificate{pair}
		}
		s.credentials = credentials.NewTLS(config)
		return nil
	}
}

// WithTransportCredentials secures the connection by gRPC's own means, where [WithTLS] does not have what is needed.
func WithTransportCredentials(secure credentials.TransportCredentials) Option {
	return func(s *settings) error {
		if secure == nil { // it must not mean plaintext
			return errors.New("the transport credentials are nil")
		}
		if s.credentials != nil {
			return errTwoCredentials
		}
		s.credentials = secure
		return nil
	}
}

// WithKey sends a key with every call, as the metadata "authorization: Bearer KEY". Without TLS it is sent to this
// machine only, unless [AllowPlaintextKey] allows more.
func WithKey(key string) Option {
	return func(s *settings) error {
		if key == "" {
			return errors.New("the key is empty")
		}
		for _, char := range []byte(key) {
			if char <= ' ' || char > '~' {
				return errors.New("a key must be one word of printable ASCII characters")
			}
		}
		s.key = key
		return nil
	}
}

// AllowPlaintextKey lets a key leave this machine without TLS, where others may read it: for networks that are secured
// otherwise.
func AllowPlaintextKey() Option {
	return func(s *settings) error {
		s.plaintextKey = true
		return nil
	}
}

// WithMaxMessageBytes changes the size of the largest message that the client sends or receives. A larger one fails
// with [codes.ResourceExhausted].
func WithMaxMessageBytes(most int) Option {
	return func(s *settings) error {
		if most < 1 {
			return fmt.Errorf("the largest message must have at least 1 byte, not %d", most)
		}
		s.maxMessageBytes = most
		return nil
	}
}

// WithKeepalive sends a ping after the connection was silent for this long while a call runs, and gives the connection
// up if the answer does not come within the timeout. gRPC for Go pings every 10 s at most; Penstock permits a ping every
// 5 s.
func WithKeepalive(after, timeout time.Duration) Option {
	return func(s *settings) error {
		if after <= 0 || timeout <= 0 {
			return fmt.Errorf("times of keepalive must be above 0, not %s and %s", after, timeout)
		}
		s.keepalive.Time, s.keepalive.Timeout = after, timeout
		return nil
	}
}

// WithoutRetries makes a call fail at once that the server could not take. By default a call that fails with
// [codes.Unavailable] before anything of its answer has come is tried up to five times.
func WithoutRetries() Option {
	return func(s *settings) error {
		s.retries = false
		return nil
	}
}

// WithDialOptions adds gRPC's own options, such as interceptors. They override those that [Dial] makes.
func WithDialOptions(more ...grpc.DialOption) Option {
	return func(s *settings) error {
		s.more = append(s.more, more...)
		return nil
	}
}

// bearer is the key of a client, as gRPC asks for it.
type bearer struct {
	key    string
	secure bool // whether gRPC may send it over TLS only
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.key}, nil
}

func (b bearer) RequireTransportSecurity() bool { return b.secure }
