// Update sends the weights of a safetensors file, or of a folder of them, to a server, which goes on serving.
//
//	go run ./examples/update -label step-2 model.safetensors
//
// The key for a server that asks for one, with the role "control", is in the environment variable PENSTOCK_TOKEN,
// and PENSTOCK_ADDR may have the address.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

var (
	addr    = flag.String("addr", cmp.Or(os.Getenv("PENSTOCK_ADDR"), "127.0.0.1:50051"), "HOST:PORT or unix:/PATH of the server")
	label   = flag.String("label", "", "the version_label of the new weights")
	id      = flag.String("update-id", "", "sends an update again that may have been applied; empty: a new one")
	partial = flag.Bool("partial", false, "tensors that are not in the file keep their values")
)

func main() {
	flag.Parse()
	if flag.NArg() != 1 || *label == "" {
		fmt.Fprintln(os.Stderr, "usage: update -label LABEL [flags] PATH")
		os.Exit(2)
	}
	if err := run(context.Background(), flag.Arg(0)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		var failed *penstock.Error
		if errors.As(err, &failed) {
			for _, bad := range failed.TensorErrors.GetErrors() {
				fmt.Fprintf(os.Stderr, "  %s: %s\n", bad.Name, bad.Reason)
			}
			fmt.Fprintf(os.Stderr, "  to send the same update again: -update-id %s\n", failed.UpdateID)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, path string) error {
	var options []penstock.Option
	if token := os.Getenv("PENSTOCK_TOKEN"); token != "" {
		options = append(options, penstock.WithKey(token))
	}
	client, err := penstock.Dial(*addr, options...)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	begin := &penstockv1.UpdateWeightsBegin{UpdateId: *id, VersionLabel: *label, Partial: *partial}
	reply, err := client.UpdateWeights(ctx, begin, path)
	if err != nil {
		return err
	}
	fmt.Printf("%s: %q serves as generation %d; %d tensors, %d bytes; no token could be made for %s\n",
		reply.Outcome, reply.Current.Label, reply.Current.Generation, reply.TensorsUpdated, reply.BytesReceived,
		reply.PausedFor.AsDuration())
	return nil
}
