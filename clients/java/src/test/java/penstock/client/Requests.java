package penstock.client;

import java.util.function.BooleanSupplier;
import penstock.v1.GenerateRequest;
import penstock.v1.PauseRequest;
import penstock.v1.SamplingParams;
import penstock.v1.StoppingParams;
import penstock.v1.StreamRequest;

/** Requests that several tests make. */
final class Requests {
    static final String PROMPT = "Once upon a time";

    private Requests() {}

    static GenerateRequest.Builder generate(int maxTokens) {
        return GenerateRequest.newBuilder()
                .setPrompt(PROMPT)
                .setSampling(greedy())
                .setStopping(length(maxTokens));
    }

    static StreamRequest.Builder stream(int maxTokens) {
        return StreamRequest.newBuilder().setPrompt(PROMPT).setSampling(greedy()).setStopping(length(maxTokens));
    }

    static SamplingParams.Builder greedy() {
        return SamplingParams.newBuilder().setTemperature(0);
    }

    /** Exactly this many tokens. */
    static StoppingParams length(int tokens) {
        return StoppingParams.newBuilder().setMaxTokens(tokens).setIgnoreEos(true).build();
    }

    /** A pause of the server, within which requests wait for as long as a test needs. */
    static AutoCloseable paused(PenstockClient client) {
        client.pause(PauseRequest.getDefaultInstance());
        return client::resume;
    }

    /** Waits until something is so. */
    static void waitUntil(String what, BooleanSupplier is) throws InterruptedException {
        long end = System.nanoTime() + 30_000_000_000L;
        while (!is.getAsBoolean()) {
            if (System.nanoTime() > end) {
                throw new AssertionError("not within 30 s: " + what);
            }
            Thread.sleep(20);
        }
    }
}
