package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.MethodDescriptor;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Collection;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;
import penstock.v1.AbortOutcome;
import penstock.v1.AbortRequest;
import penstock.v1.ClassifyInput;
import penstock.v1.ClassifyRequest;
import penstock.v1.CommitWeightsRequest;
import penstock.v1.Continuation;
import penstock.v1.ControlServiceGrpc;
import penstock.v1.DetokenizeRequest;
import penstock.v1.EmbedInput;
import penstock.v1.EmbedRequest;
import penstock.v1.GetModelInfoRequest;
import penstock.v1.GetVocabularyRequest;
import penstock.v1.InferenceServiceGrpc;
import penstock.v1.LoadAdapterRequest;
import penstock.v1.PauseRequest;
import penstock.v1.ProfileRequest;
import penstock.v1.ProfileResponse;
import penstock.v1.PushAdapterBegin;
import penstock.v1.RequestIds;
import penstock.v1.RerankRequest;
import penstock.v1.ScoreRequest;
import penstock.v1.SetTracingRequest;
import penstock.v1.StreamResponse;
import penstock.v1.TokenizeRequest;
import penstock.v1.TraceLevel;
import penstock.v1.UpdateOutcome;
import penstock.v1.UpdateWeightsBegin;
import penstock.v1.WatchLoadRequest;
import penstock.v1.WatchLoadResponse;

class RpcsTest {
    @TempDir
    static Path folder;

    private static Set<String> methodsOfTheContract() {
        return Stream.of(InferenceServiceGrpc.getServiceDescriptor(), ControlServiceGrpc.getServiceDescriptor())
                .map(service -> service.getMethods())
                .flatMap(Collection::stream)
                .map(MethodDescriptor::getFullMethodName)
                .collect(Collectors.toCollection(TreeSet::new));
    }

    @Test
    void theClientHasAMethodForEveryRpcOfTheContract() throws Exception {
        CalledMethods called = new CalledMethods();
        try (PenstockClient client = PenstockClient.builder(DemoServer.shared().address())
                .intercept(called)
                .build()) {
            generation(client);
            questions(client);
            orders(client);
            weights(client);
            adapters(client);
        }
        assertEquals(methodsOfTheContract(), called.names());
    }

    private static void generation(PenstockClient client) {
        assertEquals(3, client.generate(Requests.generate(3).build()).getUsage().getCompletionTokens());
        try (ServerStream<StreamResponse> events = client.stream(Requests.stream(1).build())) {
            assertTrue(events.next().hasStarted());
        }
        EmbedRequest embed = EmbedRequest.newBuilder()
                .addInputs(EmbedInput.newBuilder().setText("Once upon a time"))
                .build();
        assertFalse(client.embed(embed).getEmbeddings(0).getValues().isEmpty());
        ScoreRequest score = ScoreRequest.newBuilder()
                .setPrompt("Once upon")
                .addContinuations(Continuation.newBuilder().setText(" a time"))
                .build();
        assertTrue(client.score(score).getScores(0).getTotalLogprob() < 0);
        RerankRequest rerank = RerankRequest.newBuilder()
                .setQuery("Once upon")
                .addDocuments("a time")
                .addDocuments("Once upon")
                .build();
        assertEquals(1, client.rerank(rerank).getResults(0).getIndex());
        ClassifyRequest classify = ClassifyRequest.newBuilder()
                .addInputs(ClassifyInput.newBuilder().setText("Once upon"))
                .build();
        assertThrows(RefusedException.Unsupported.class, () -> client.classify(classify), "the model has no classifier");
        RequestIds ids = RequestIds.newBuilder().addIds("nobody").build();
        assertEquals(
                AbortOutcome.ABORT_OUTCOME_NOT_FOUND,
                client.abort(AbortRequest.newBuilder().setRequestIds(ids).build()).getResults(0).getOutcome());
    }

    private static void questions(PenstockClient client) {
        assertEquals("demo", client.modelInfo(GetModelInfoRequest.getDefaultInstance()).getModel());
        assertTrue(client.serverInfo().getMaxRunningRequests() > 0);
        assertTrue(client.load().getKvPagesTotal() > 0);
        try (ServerStream<WatchLoadResponse> loads = client.watchLoad(WatchLoadRequest.getDefaultInstance())) {
            assertTrue(loads.next().getTotals().hasSince());
        }
        int token = client.tokenize(TokenizeRequest.newBuilder().setText(" time").build()).getTokenIds(0);
        assertEquals(" time", client.detokenize(DetokenizeRequest.newBuilder().addTokenIds(token).build()).getText());
        GetVocabularyRequest page =
                GetVocabularyRequest.newBuilder().setFirstTokenId(token).build();
        assertEquals(" time", client.vocabulary(page).getTokens(0).toStringUtf8());
    }

    private static void orders(PenstockClient client) {
        client.pause(PauseRequest.getDefaultInstance());
        assertTrue(client.load().getPaused());
        client.resume();
        assertFalse(client.load().getPaused());
        assertEquals(0, client.flushCache().getPagesInUse());
        assertEquals(
                TraceLevel.TRACE_LEVEL_OFF,
                client.setTracing(SetTracingRequest.getDefaultInstance()).getCurrent());
        try (ServerStream<ProfileResponse> profile = client.profile(ProfileRequest.getDefaultInstance())) {
            assertThrows(RefusedException.Unsupported.class, profile::hasNext, "it has no folder for profiles");
        }
    }

    private static void weights(PenstockClient client) throws Exception {
        UpdateWeightsBegin begin = UpdateWeightsBegin.newBuilder().setVersionLabel("v").setValidateOnly(true).build();
        assertEquals(
                UpdateOutcome.UPDATE_OUTCOME_VALIDATED,
                client.updateWeights(DemoServer.CHECKPOINT, begin).getOutcome());
        assertThrows(
                RefusedException.UnknownUpdate.class,
                () -> client.commitWeights(
                        CommitWeightsRequest.newBuilder().setUpdateId("nothing").build()));
        assertFalse(client.discardWeights("nothing").getDiscarded());
    }

    private static void adapters(PenstockClient client) throws Exception {
        assertEquals(0, client.listAdapters().getAdaptersCount());
        Files.writeString(folder.resolve("adapter_config.json"), "{}");
        Files.createSymbolicLink(folder.resolve("adapter_model.safetensors"), DemoServer.CHECKPOINT);
        PushAdapterBegin begin = PushAdapterBegin.newBuilder().setName("sql").build();
        LoadAdapterRequest load = LoadAdapterRequest.newBuilder().setName("sql").build();
        List<Executable> calls = List.of(
                () -> client.loadAdapter(load),
                () -> client.pushAdapter(folder, begin, (sent, total) -> {}),
                () -> client.unloadAdapter("sql"),
                () -> client.pinAdapter("sql", true));
        for (Executable call : calls) {
            assertThrows(RefusedException.Unsupported.class, call, "it has no places for adapters");
        }
    }
}
