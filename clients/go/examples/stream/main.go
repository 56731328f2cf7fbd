// Stream asks a server to go on with a text, and prints the text while it is generated.
//
//	go run ./examples/stream "Once upon a time"
//
// The key for a server that asks for one is in the environment variable PENSTOCK_TOKEN,
// and PENSTOCK_ADDR may have the address.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

var (
	addr      = flag.String("addr", cmp.Or(os.Getenv("PENSTOCK_ADDR"), "127.0.0.1:50051"), "HOST:PORT or unix:/PATH of the server")
	ca        = flag.String("ca", "", "use TLS, and trust the authorities in this PEM file")
	cert      = flag.String("cert", "", "PEM file of the client's certificate (mTLS)")
	key       = flag.String("key", "", "PEM file of the private key of -cert")
	maxTokens = flag.Uint("max-tokens", 60, "the most tokens to generate")
	seed      = flag.Uint64("seed", 0, "draw the same tokens at every run; 0: new ones")
	timeout   = flag.Duration("timeout", time.Minute, "how long the call may take")
)

func main() {
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, `usage: stream [flags] PROMPT`)
		os.Exit(2)
	}
	if err := run(strings.Join(flag.Args(), " ")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		var failed *penstock.Error
		if errors.As(err, &failed) {
			for _, violation := range failed.Violations {
				fmt.Fprintf(os.Stderr, "  %s: %s\n", violation.Field, violation.Description)
			}
			if failed.Retryable() {
				fmt.Fprintf(os.Stderr, "  try again in %s\n", failed.RetryAfter)
			}
		}
		os.Exit(1)
	}
}

func run(prompt string) error {
	var options []penstock.Option
	if *ca != "" || *cert != "" {
		options = append(options, penstock.WithTLS(penstock.TLS{CAFile: *ca, CertFile: *cert, KeyFile: *key}))
	}
	if token := os.Getenv("PENSTOCK_TOKEN"); token != "" {
		options = append(options, penstock.WithKey(token))
	}
	client, err := penstock.Dial(*addr, options...)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()

	// Ctrl-C or the timeout ends the call, and the server frees the request.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, *timeout)
	defer cancel()

	most := uint32(*maxTokens)
	request := &penstockv1.StreamRequest{
		Input:    &penstockv1.StreamRequest_Prompt{Prompt: prompt},
		Stopping: &penstockv1.StoppingParams{MaxTokens: &most},
	}
	if *seed != 0 {
		request.Sampling = &penstockv1.SamplingParams{Seed: seed}
	}
	fmt.Print(prompt)
	for event, err := range client.Stream(ctx, request) {
		if err != nil {
			fmt.Println()
			return err
		}
		switch event := event.Event.(type) {
		case *penstockv1.StreamResponse_Delta:
			fmt.Print(event.Delta.Text)
		case *penstockv1.StreamResponse_Finished:
			fmt.Printf("\n[%s]\n", event.Finished.Finish.Reason)
		case *penstockv1.StreamResponse_Summary:
			fmt.Printf("[%d tokens in %s]\n", event.Summary.Usage.CompletionTokens, event.Summary.Timing.Total.AsDuration())
		}
	}
	return nil
}
