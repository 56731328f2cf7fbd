package penstock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

// README.md shows the parts of these functions between the lines of dashes.

func ExampleDial() {
	// ---
	client, err := penstock.Dial("models.example:50051",
		penstock.WithTLS(penstock.TLS{
			CAFile:   "ca.pem",    // without it: the authorities that this machine trusts
			CertFile: "alice.pem", // with KeyFile: for a server that asks for a certificate (mTLS)
			KeyFile:  "alice.key",
		}),
		penstock.WithKey(os.Getenv("PENSTOCK_TOKEN")), // for a server with keys
	)
	// ---
	fmt.Println(client, err != nil)
	// Output: <nil> true
}

func ExampleDial_limits() {
	// ---
	client, err := penstock.Dial("127.0.0.1:50051",
		penstock.WithKeepalive(30*time.Second, 10*time.Second), // the defaults
		penstock.WithMaxMessageBytes(64<<20),                   // the default
		penstock.WithoutRetries(),
	)
	// ---
	fmt.Println(client != nil, err)
	// Output: true <nil>
}

func ExampleClient_Stream() {
	client, err := penstock.Dial(demo.addr)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	run := func() error {
		// ---
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		temperature, maxTokens := 0.0, uint32(4)
		request := &penstockv1.StreamRequest{
			Input:    &penstockv1.StreamRequest_Prompt{Prompt: "Once upon a time"},
			Sampling: &penstockv1.SamplingParams{Temperature: &temperature},
			Stopping: &penstockv1.StoppingParams{MaxTokens: &maxTokens},
		}
		for event, err := range client.Stream(ctx, request) {
			if err != nil {
				return err
			}
			fmt.Print(event.GetDelta().GetText())
		}
		// ---
		return nil
	}
	fmt.Println(run())
	// Output: , there lived a<nil>
}

func ExampleClient_Generate() {
	client, err := penstock.Dial(demo.addr)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	run := func(ctx context.Context) error {
		// ---
		temperature, maxTokens := 0.0, uint32(20)
		reply, err := client.Generate(ctx, &penstockv1.GenerateRequest{
			Input: &penstockv1.GenerateRequest_Chat{Chat: &penstockv1.ChatPrompt{
				Messages: []*penstockv1.ChatMessage{{Role: "user", Content: "what is 3 + 4?"}},
			}},
			Sampling: &penstockv1.SamplingParams{Temperature: &temperature},
			Stopping: &penstockv1.StoppingParams{MaxTokens: &maxTokens},
		})
		if err != nil {
			return err
		}
		fmt.Println(reply.Outputs[0].Text, reply.Outputs[0].Finish.Reason)
		// ---
		return nil
	}
	fmt.Println(run(context.Background()))
	// Output: 3 + 4 = 7. FINISH_REASON_EOS
	// <nil>
}

func ExampleClient_Generate_image() {
	client, err := penstock.Dial(demo.addr)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	run := func(ctx context.Context, image []byte) error {
		// ---
		message := &penstockv1.ChatMessage{Role: "user", Parts: []*penstockv1.ContentPart{
			{Part: &penstockv1.ContentPart_Image{Image: &penstockv1.Image{Data: image, MediaType: "image/png"}}},
			{Part: &penstockv1.ContentPart_Text{Text: "What is this?"}},
		}}
		reply, err := client.Generate(ctx, &penstockv1.GenerateRequest{
			Input: &penstockv1.GenerateRequest_Chat{Chat: &penstockv1.ChatPrompt{Messages: []*penstockv1.ChatMessage{message}}},
		})
		if errors.Is(err, penstock.ErrUnsupportedFeature) {
			return errors.New("this model takes no images")
		}
		if err != nil {
			return err
		}
		fmt.Println(reply.Outputs[0].Text, reply.Usage.ImageTokens)
		// ---
		return nil
	}
	fmt.Println(run(context.Background(), []byte("\x89PNG\r\n\x1a\n")))
	// Output: this model takes no images
}

func ExampleError() {
	client, err := penstock.Dial(demo.addr)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	_, err = client.Generate(context.Background(), &penstockv1.GenerateRequest{})
	// ---
	var failed *penstock.Error
	switch {
	case errors.Is(err, penstock.ErrPromptTooLong):
		fmt.Println("the prompt must become shorter")
	case errors.As(err, &failed) && failed.Retryable():
		fmt.Println("the same call may succeed in", failed.RetryAfter)
	case errors.As(err, &failed):
		fmt.Println(failed.Code, failed.Reason)
		for _, violation := range failed.Violations {
			fmt.Println(violation.Field, "is wrong:", violation.Description)
		}
	}
	// ---
	// Output: InvalidArgument INVALID_FIELD
	// input is wrong: one of prompt, prompt_token_ids and chat is required
}

func ExampleClient_UpdateWeights() {
	client, err := penstock.Dial(demo.addr)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	path := demoWeights()
	run := func(ctx context.Context) error {
		// ---
		begin := &penstockv1.UpdateWeightsBegin{UpdateId: "run-7-step-42", VersionLabel: "step-42"}
		reply, err := client.UpdateWeights(ctx, begin, path)
		if err != nil {
			return err
		}
		fmt.Println(reply.Current.Label, "serves")
		// ---
		return nil
	}
	fmt.Println(run(context.Background()))
	// Output: step-42 serves
	// <nil>
}

func ExampleClient_WaitReady() {
	client, err := penstock.Dial(demo.addr)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	// ---
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := client.WaitReady(ctx); err != nil {
		log.Fatal(err)
	}
	// ---
	fmt.Println("ready")
	// Output: ready
}
