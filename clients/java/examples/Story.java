import java.io.IOException;
import java.time.Duration;
import java.util.Map;
import penstock.client.PenstockClient;
import penstock.client.PenstockException;
import penstock.client.ServerStream;
import penstock.client.Violation;
import penstock.v1.SamplingParams;
import penstock.v1.StoppingParams;
import penstock.v1.StreamRequest;
import penstock.v1.StreamResponse;

/** Asks a server to go on with a text, and prints the text while it is generated. */
public final class Story {
    private static final Map<String, String> OPTIONS = Map.of(
            "max-tokens", "the most tokens to generate; otherwise 60",
            "seed", "draw the same tokens at every run",
            "timeout-ms", "how long the call may take; otherwise 60000");

    private Story() {}

    public static void main(String[] arguments) throws IOException {
        Arguments given = Arguments.of("Story PROMPT", OPTIONS, arguments);
        if (given.words().isEmpty()) {
            throw given.refused("there is no prompt");
        }
        try {
            print(given, String.join(" ", given.words()));
        } catch (PenstockException error) {
            System.err.println("\n" + error.getClass().getSimpleName() + ": " + error.getMessage());
            for (Violation violation : error.violations()) {
                System.err.println("  " + violation.field() + ": " + violation.description());
            }
            error.retryAfter().ifPresent(delay -> System.err.println("  try again in " + delay.toMillis() + " ms"));
            System.exit(1);
        }
    }

    private static void print(Arguments given, String prompt) throws IOException {
        int maxTokens = Math.toIntExact(given.number("max-tokens").orElse(60));
        StreamRequest.Builder request = StreamRequest.newBuilder()
                .setPrompt(prompt)
                .setStopping(StoppingParams.newBuilder().setMaxTokens(maxTokens));
        given.number("seed")
                .ifPresent(seed -> request.setSampling(SamplingParams.newBuilder().setSeed(seed)));
        Duration timeout = Duration.ofMillis(given.number("timeout-ms").orElse(60_000));
        System.out.print(prompt);
        try (PenstockClient client = given.client().build();
                ServerStream<StreamResponse> events = client.withTimeout(timeout).stream(request.build())) {
            for (StreamResponse event : events) {
                switch (event.getEventCase()) {
                    case DELTA -> System.out.print(event.getDelta().getText());
                    case FINISHED -> System.out.printf("%n[%s]%n", event.getFinished().getFinish().getReason());
                    case SUMMARY -> System.out.printf(
                            "[%d tokens]%n", event.getSummary().getUsage().getCompletionTokens());
                    default -> { } // the contract grows: what is new is passed over
                }
                System.out.flush();
            }
        }
    }
}
