package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import com.google.protobuf.ByteString;
import io.grpc.StatusRuntimeException;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.ExecutionException;
import java.util.regex.Pattern;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import penstock.v1.*;

/** README.md shows what stands here between lines of dashes. */
class ReadmeExamplesTest {
    private static final Pattern SHOWN = Pattern.compile("(?s)```java\n(.*?)```");
    private static final Pattern HERE = Pattern.compile("(?s)// -{3}\n(.*?)\n *// -{3}\n");
    private static PenstockClient client;

    @BeforeAll
    static void connect() throws Exception {
        client = DemoServer.shared().client();
    }

    @AfterAll
    static void close() {
        client.close();
    }

    private static List<String> parts(Pattern of, String path) throws IOException {
        return of.matcher(Files.readString(Path.of(path)))
                .results()
                .map(found -> found.group(1).stripIndent().strip())
                .filter(part -> !part.startsWith("import "))
                .sorted()
                .toList();
    }

    @Test
    void theReadmeShowsWhatIsTestedHere() throws IOException {
        assertEquals(
                parts(HERE, "src/test/java/penstock/client/ReadmeExamplesTest.java"), parts(SHOWN, "README.md"));
    }

    @Test
    void streaming() {
        // ---
        StreamRequest request = StreamRequest.newBuilder()
                .setPrompt("Once upon a time")
                .setSampling(SamplingParams.newBuilder().setTemperature(0))
                .setStopping(StoppingParams.newBuilder().setMaxTokens(20))
                .build();
        try (ServerStream<StreamResponse> events = client.stream(request)) {
            for (StreamResponse event : events) {
                System.out.print(event.getDelta().getText());
            }
        }
        // ---
    }

    @Test
    void generating() {
        // ---
        ChatMessage question = ChatMessage.newBuilder().setRole("user").setContent("what is 3 + 4?").build();
        GenerateResponse reply = client.generate(GenerateRequest.newBuilder()
                .setChat(ChatPrompt.newBuilder().addMessages(question))
                .setSampling(SamplingParams.newBuilder().setTemperature(0))
                .build());
        System.out.println(reply.getOutputs(0).getText());
        // ---
        assertEquals(1, reply.getOutputsCount());
    }

    @Test
    void showing() {
        ByteString image = ByteString.copyFromUtf8("an image");
        // ---
        ChatMessage question = ChatMessage.newBuilder()
                .setRole("user")
                .addParts(ContentPart.newBuilder()
                        .setImage(Image.newBuilder().setData(image).setMediaType("image/png")))
                .addParts(ContentPart.newBuilder().setText("What is this?"))
                .build();
        try {
            GenerateResponse reply = client.generate(GenerateRequest.newBuilder()
                    .setChat(ChatPrompt.newBuilder().addMessages(question))
                    .build());
            System.out.println(reply.getOutputs(0).getText() + reply.getUsage().getImageTokens());
        } catch (RefusedException.Unsupported error) {
            System.out.println("this model takes no images: " + error.getMessage());
        }
        // ---
    }

    @Test
    void failing() {
        GenerateRequest request = Requests.generate(1).setModel("another").build();
        // ---
        try {
            client.generate(request);
        } catch (RefusedException.PromptTooLong error) {
            System.out.println("the prompt must become shorter: " + error.metadata());
        } catch (RefusedException.InvalidRequest error) {
            for (Violation violation : error.violations()) {
                System.out.println(violation.field() + ": " + violation.description());
            }
        } catch (UnavailableException error) {
            System.out.println("try again in " + error.retryAfter().orElse(Duration.ofSeconds(1)));
        } catch (PenstockException error) {
            System.out.println(error.code() + " " + error.reason() + ": " + error.getMessage());
        }
        // ---
    }

    @Test
    void securing() {
        String key = "psk_1";
        assertThrows(FileNotFoundException.class, () -> {
            // ---
            PenstockClient client = PenstockClient.builder("localhost:50051")
                    .tls(Tls.trusting(Path.of("ca.pem")) // or Tls.wellKnown(): whom Java trusts
                            .withCertificate(Path.of("alice.pem"), Path.of("alice.key"))) // where asked for (mTLS)
                    .key(key) // where the server has keys
                    .build();
            // ---
            client.close();
        });
    }

    @Test
    void hurrying() {
        GenerateRequest request = Requests.generate(1).build();
        // ---
        PenstockClient hurried = client.withTimeout(Duration.ofSeconds(30));
        GenerateResponse reply = hurried.generate(request);
        // ---
        assertEquals(1, reply.getOutputsCount());
    }

    @Test
    void limiting() throws IOException {
        // ---
        PenstockClient client = PenstockClient.builder("127.0.0.1:50051")
                .keepAlive(Duration.ofSeconds(30), Duration.ofSeconds(10)) // the defaults
                .maxMessageBytes(64 << 20) // the default
                .withoutRetries()
                .build();
        // ---
        client.close();
    }

    @Test
    void waiting() throws InterruptedException {
        // ---
        client.waitReady(Duration.ofMinutes(5));
        // ---
    }

    @Test
    void updating() throws IOException {
        Path path = DemoServer.CHECKPOINT;
        // ---
        UpdateWeightsBegin begin = UpdateWeightsBegin.newBuilder()
                .setUpdateId("run-7-step-42")
                .setVersionLabel("step-42")
                .build();
        UpdateWeightsResponse reply = client.updateWeights(path, begin);
        System.out.println(reply.getCurrent().getLabel() + " serves");
        // ---
        assertEquals("step-42", reply.getCurrent().getLabel());
    }

    @Test
    void callingOnStubsOfGrpc() {
        GenerateRequest request = Requests.generate(1).setModel("another").build();
        assertThrows(RefusedException.UnknownModel.class, () -> {
            // ---
            InferenceServiceGrpc.InferenceServiceFutureStub stub = InferenceServiceGrpc.newFutureStub(client.channel());
            try {
                System.out.println(stub.generate(request).get().getUsage());
            } catch (ExecutionException error) {
                throw PenstockException.from((StatusRuntimeException) error.getCause());
            }
            // ---
        });
    }
}
