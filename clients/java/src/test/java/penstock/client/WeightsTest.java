package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.io.RandomAccessFile;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import penstock.v1.CommitWeightsRequest;
import penstock.v1.GetModelInfoRequest;
import penstock.v1.GetModelInfoResponse;
import penstock.v1.TensorErrorReason;
import penstock.v1.UpdateOutcome;
import penstock.v1.UpdateWeightsBegin;
import penstock.v1.UpdateWeightsResponse;

/** Weights are sent to a server of the demo model, which answers with them. */
class WeightsTest {
    private static final String NORM = "model.norm.weight";
    private static PenstockClient client;

    @TempDir
    static Path folder;

    @BeforeAll
    static void connect() throws Exception {
        client = DemoServer.shared().client();
    }

    @AfterAll
    static void close() {
        client.close();
    }

    private static UpdateWeightsBegin.Builder begin(String label) {
        return UpdateWeightsBegin.newBuilder().setVersionLabel(label);
    }

    private static GetModelInfoResponse model() {
        return client.modelInfo(GetModelInfoRequest.getDefaultInstance());
    }

    private static String story() {
        return client.generate(Requests.generate(20).build()).getOutputs(0).getText();
    }

    /** A safetensors file with one tensor of the model's bfloat16 type. */
    private static Path file(String name, int length, int value) throws IOException {
        String header = "{\"%s\": {\"dtype\": \"BF16\", \"shape\": [%d], \"data_offsets\": [0, %d]}}"
                .formatted(name, length, 2 * length);
        ByteBuffer bytes =
                ByteBuffer.allocate(8 + header.length() + 2 * length).order(ByteOrder.LITTLE_ENDIAN);
        bytes.putLong(header.length()).put(header.getBytes(StandardCharsets.UTF_8));
        for (int i = 0; i < length; i++) {
            bytes.putShort((short) value);
        }
        return Files.write(folder.resolve(name + length + ".safetensors"), bytes.array());
    }

    @Test
    void newWeightsAnswerAndTheGenerationRises() throws Exception {
        String before = story();
        long generation = model().getWeights().getGeneration();
        int zeros = 0;
        UpdateWeightsResponse one =
                client.updateWeights(file(NORM, 256, zeros), begin("silent").setPartial(true).build());
        assertEquals(UpdateOutcome.UPDATE_OUTCOME_COMMITTED, one.getOutcome());
        assertEquals(generation + 1, one.getCurrent().getGeneration());
        assertEquals("silent", model().getWeights().getLabel());
        assertNotEquals(before, story());

        List<Long> progress = new ArrayList<>();
        UpdateWeightsBegin whole = begin("as before").setUpdateId("java-2").build();
        UpdateWeightsResponse two = client.updateWeights(
                DemoServer.CHECKPOINT, whole, (sent, total) -> progress.add(sent * 1_000_000_000L + total));
        assertEquals(generation + 2, two.getCurrent().getGeneration());
        assertEquals(before, story());

        JsonObject header = header(DemoServer.CHECKPOINT);
        header.remove("__metadata__");
        long bytes = header.asMap().values().stream()
                .map(entry -> entry.getAsJsonObject().getAsJsonArray("data_offsets"))
                .mapToLong(offsets -> offsets.get(1).getAsLong() - offsets.get(0).getAsLong())
                .sum();
        assertEquals(header.size(), two.getTensorsUpdated());
        assertEquals(bytes, two.getBytesReceived());
        assertEquals(progress.stream().sorted().toList(), progress);
        assertEquals(bytes * 1_000_000_000L + bytes, progress.get(progress.size() - 1));

        UpdateWeightsResponse again = client.updateWeights(DemoServer.CHECKPOINT, whole);
        assertEquals(UpdateOutcome.UPDATE_OUTCOME_ALREADY_COMMITTED, again.getOutcome());
        assertEquals(generation + 2, model().getWeights().getGeneration());
    }

    private static JsonObject header(Path file) throws IOException {
        byte[] bytes = Files.readAllBytes(file);
        int length = (int) ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).getLong();
        return JsonParser.parseString(new String(bytes, 8, length, StandardCharsets.UTF_8)).getAsJsonObject();
    }

    @Test
    void stagedWeightsWaitForTheirCommit() throws Exception {
        long generation = model().getWeights().getGeneration();
        UpdateWeightsBegin staged = begin("staged").setUpdateId("java-staged").setStageOnly(true).build();
        assertEquals(
                UpdateOutcome.UPDATE_OUTCOME_STAGED,
                client.updateWeights(DemoServer.CHECKPOINT, staged).getOutcome());
        assertEquals("java-staged", model().getStagedUpdateId());
        ConflictException.UpdateUnderWay busy = assertThrows(
                ConflictException.UpdateUnderWay.class,
                () -> client.updateWeights(DemoServer.CHECKPOINT, begin("other").build()));
        assertFalse(busy.updateId().isEmpty());
        assertTrue(client.discardWeights("java-staged").getDiscarded());

        client.updateWeights(DemoServer.CHECKPOINT, staged);
        CommitWeightsRequest commit = CommitWeightsRequest.newBuilder().setUpdateId("java-staged").build();
        assertEquals(generation + 1, client.commitWeights(commit).getCurrent().getGeneration());
    }

    @Test
    void everyBadTensorIsNamedAndNothingChanges() throws Exception {
        long generation = model().getWeights().getGeneration();
        RefusedException.TensorsRefused error = assertThrows(
                RefusedException.TensorsRefused.class,
                () -> client.updateWeights(
                        file(NORM, 3, 0),
                        begin("bad").setUpdateId("java-bad").setPartial(true).build()));
        assertEquals(1, error.tensorErrors().size());
        assertEquals(NORM, error.tensorErrors().get(0).getName());
        assertEquals(
                TensorErrorReason.TENSOR_ERROR_REASON_SHAPE,
                error.tensorErrors().get(0).getReason());
        assertEquals(List.of(256L), error.tensorErrors().get(0).getExpected().getShapeList());
        assertFalse(error.hasMore());
        assertEquals("java-bad", error.updateId());
        assertThrows(
                ConflictException.GenerationChanged.class,
                () -> client.updateWeights(
                        DemoServer.CHECKPOINT,
                        begin("late").setExpectedGeneration(generation + 100).build()));
        assertEquals(generation, model().getWeights().getGeneration());
    }

    @Test
    void anUpdateThatFailsHereChangesNothing() throws Exception {
        long generation = model().getWeights().getGeneration();
        assertThrows(
                IllegalStateException.class,
                () -> client.updateWeights(DemoServer.CHECKPOINT, begin("half").build(), (sent, total) -> {
                    throw new IllegalStateException("enough");
                }));
        // Only an update that takes the place of the dropped one shows that it is gone. One that is only
        // validated is answered beside others.
        Requests.waitUntil("the server has dropped the update", () -> {
            try {
                UpdateWeightsResponse next = client.updateWeights(DemoServer.CHECKPOINT, begin("whole").build());
                assertEquals(generation, next.getPrevious().getGeneration());
                return true;
            } catch (ConflictException.UpdateUnderWay notYet) {
                return false;
            } catch (IOException error) {
                throw new AssertionError(error);
            }
        });
    }

    @Test
    void chunksFitTheClientsOwnMessages() throws Exception {
        try (PenstockClient small = PenstockClient.builder(DemoServer.shared().address())
                .maxMessageBytes(100_000)
                .build()) {
            UpdateWeightsResponse answer =
                    small.updateWeights(DemoServer.CHECKPOINT, begin("in pieces").build());
            assertEquals("in pieces", answer.getCurrent().getLabel());
        }
    }

    @Test
    void theTimeoutIsForTheReadingOfFilesToo() throws Exception {
        Path large = folder.resolve("large.safetensors");
        byte[] header = "{\"a\": {\"dtype\": \"I8\", \"shape\": [10000000000], \"data_offsets\": [0, 10000000000]}}"
                .getBytes(StandardCharsets.UTF_8);
        try (RandomAccessFile file = new RandomAccessFile(large.toFile(), "rw")) { // its bytes are on no disk
            file.write(ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(header.length).array());
            file.write(header);
            file.setLength(8 + header.length + 10_000_000_000L);
        }
        DeadlineExceededException error = assertThrows(
                DeadlineExceededException.class,
                () -> client.withTimeout(Duration.ofMillis(100)).updateWeights(large, begin("late").build()));
        assertTrue(error.getMessage().contains("checksums"), error.getMessage());
        assertFalse(error.updateId().isEmpty());
    }

    @Test
    void filesThatTheServerReadsNeedItsOperatorsLeave() {
        assertThrows(
                PenstockException.class,
                () -> client.updateWeights("file://" + DemoServer.CHECKPOINT, begin("uri").build()));
        UpdateWeightsBegin twice = begin("two sources").setUri("file:///tmp").build();
        assertThrows(IllegalArgumentException.class, () -> client.updateWeights("file:///tmp", twice));
        assertThrows(IllegalArgumentException.class, () -> client.updateWeights(DemoServer.CHECKPOINT, twice));
    }
}
