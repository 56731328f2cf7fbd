import java.io.IOException;
import java.time.Duration;
import penstock.client.PenstockClient;
import penstock.client.PenstockException;
import penstock.client.ServerStream;
import penstock.client.Violation;
import penstock.v1.SamplingParams;
import penstock.v1.StoppingParams;
import penstock.v1.StreamRequest;
import penstock.v1.StreamResponse;

/**
 * Asks a server to go on with a text, and prints the text while it is generated.
 *
 * <p>Options: --addr, --ca, --cert, --key, --max-tokens, --seed, --timeout-ms.
 */
public final class Story {
    private Story() {}

    public static void main(String[] arguments) throws IOException {
        Arguments given = Arguments.of(arguments);
        if (given.words().isEmpty()) {
            System.err.println("usage: Story [--option value]... PROMPT");
            System.exit(2);
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
        int maxTokens = Integer.parseInt(given.option("max-tokens").orElse("60"));
        StreamRequest.Builder request = StreamRequest.newBuilder()
                .setPrompt(prompt)
                .setStopping(StoppingParams.newBuilder().setMaxTokens(maxTokens));
        given.option("seed")
                .ifPresent(seed -> request.setSampling(SamplingParams.newBuilder().setSeed(Long.parseLong(seed))));
        Duration timeout = Duration.ofMillis(Long.parseLong(given.option("timeout-ms").orElse("60000")));
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
