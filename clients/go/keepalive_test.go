package penstock_test

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

const (
	framePing    = 6
	flagAck      = 1
	preface      = 24 // bytes that a client sends before its first frame
	keepalive    = 10 * time.Second
	answerWithin = 2 * time.Second
)

// relay is a network between a client and the server, which can fail: then it takes what it is given and passes on
// nothing. It notes the pings and their answers; those that gRPC measures the bandwidth with have a content.
type relay struct {
	addr    string
	mutex   sync.Mutex
	cut     bool
	pings   int // from the client
	answers int // from the server
}

func relayed(t *testing.T, to string) *relay {
	t.Helper()
	listener := must[net.Listener](t)(net.Listen("tcp", "127.0.0.1:0"))
	found := &relay{addr: listener.Addr().String()}
	var ends []net.Conn
	var mutex sync.Mutex
	t.Cleanup(func() {
		_ = listener.Close()
		mutex.Lock()
		defer mutex.Unlock()
		for _, end := range ends {
			_ = end.Close()
		}
	})
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				_ = client.Close()
				continue
			}
			mutex.Lock()
			ends = append(ends, client, server)
			mutex.Unlock()
			go found.forward(client, server, preface, func(flags byte) {
				if flags&flagAck == 0 {
					found.pings++
				}
			})
			go found.forward(server, client, 0, func(flags byte) {
				if flags&flagAck != 0 {
					found.answers++
				}
			})
		}
	}()
	return found
}

// forward passes on frame by frame, and tells of the flags of each ping without content.
func (r *relay) forward(from, to net.Conn, before int, ping func(flags byte)) {
	defer func() { _ = to.Close() }()
	reader := bufio.NewReader(from)
	pass := func(data []byte) {
		if _, err := to.Write(data); err != nil {
			_ = from.Close()
		}
	}
	start := make([]byte, before)
	if _, err := io.ReadFull(reader, start); err != nil {
		return
	}
	pass(start)
	for {
		head := make([]byte, 9)
		if _, err := io.ReadFull(reader, head); err != nil {
			return
		}
		payload := make([]byte, int(binary.BigEndian.Uint32(append([]byte{0}, head[:3]...))))
		if _, err := io.ReadFull(reader, payload); err != nil {
			return
		}
		r.mutex.Lock()
		if head[3] == framePing && string(payload) == strings.Repeat("\x00", 8) {
			ping(head[4])
		}
		cut := r.cut
		r.mutex.Unlock()
		if !cut {
			pass(append(head, payload...))
		}
	}
}

func (r *relay) seen() (pings, answers int) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.pings, r.answers
}

// silent is a call that brings one message, and the next one after a minute.
func silent(t *testing.T, client *penstock.Client) chan error {
	t.Helper()
	begun, ended := make(chan bool), make(chan error, 1)
	request := &penstockv1.WatchLoadRequest{Interval: durationpb.New(time.Minute)}
	go func() {
		first := true
		var last error
		for _, err := range client.WatchLoad(t.Context(), request) {
			if last = err; first {
				first = false
				close(begun)
			}
		}
		ended <- last
	}()
	<-begun
	return ended
}

func TestPingsTellAQuietConnectionFromADeadOne(t *testing.T) {
	t.Parallel()
	network := relayed(t, demo.addr)
	client := dial(t, network.addr, penstock.WithKeepalive(keepalive, answerWithin))
	ended := silent(t, client)
	until(t, "a ping is answered", func() bool {
		_, answers := network.seen()
		return answers > 0
	})
	select {
	case err := <-ended:
		t.Fatalf("a quiet connection was given up: %v", err)
	default:
	}

	network.mutex.Lock()
	before := network.pings
	network.cut = true
	network.mutex.Unlock()
	var failed *penstock.Error
	select {
	case err := <-ended:
		if !errors.As(err, &failed) || failed.Code != codes.Unavailable || !strings.Contains(failed.Message, "keepalive") {
			t.Errorf("a dead connection: %v", err)
		}
	case <-time.After(waitLimit):
		t.Fatal("a dead connection was not noticed")
	}
	if pings, _ := network.seen(); pings <= before {
		t.Error("no ping was sent")
	}
}
