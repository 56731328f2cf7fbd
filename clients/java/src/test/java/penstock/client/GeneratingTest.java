package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.stream.IntStream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import penstock.v1.ChatMessage;
import penstock.v1.ChatPrompt;
import penstock.v1.DetokenizeRequest;
import penstock.v1.FinishReason;
import penstock.v1.GenerateRequest;
import penstock.v1.GenerateResponse;
import penstock.v1.InferenceServiceGrpc;
import penstock.v1.SamplingParams;
import penstock.v1.StreamResponse;
import penstock.v1.TokenizeRequest;

/** What a client is for, against a server of the demo model. */
class GeneratingTest {
    private static PenstockClient client;

    @BeforeAll
    static void connect() throws Exception {
        client = DemoServer.shared().client();
        client.waitReady(Duration.ofSeconds(60));
    }

    @AfterAll
    static void close() {
        client.close();
    }

    @Test
    void theDeltasOfAStreamAreTheOutputsOfGenerate() {
        SamplingParams two = SamplingParams.newBuilder().setSeed(7).setN(2).build();
        GenerateResponse whole = client.generate(Requests.generate(40).setSampling(two).build());
        List<StringBuilder> texts = List.of(new StringBuilder(), new StringBuilder());
        List<List<Integer>> tokens = List.of(new ArrayList<>(), new ArrayList<>());
        List<StreamResponse.EventCase> kinds = new ArrayList<>();
        try (ServerStream<StreamResponse> events = client.stream(Requests.stream(40).setSampling(two).build())) {
            for (StreamResponse event : events) {
                kinds.add(event.getEventCase());
                texts.get(event.getDelta().getIndex()).append(event.getDelta().getText());
                tokens.get(event.getDelta().getIndex()).addAll(event.getDelta().getTokenIdsList());
            }
        }
        assertEquals(StreamResponse.EventCase.STARTED, kinds.get(0));
        assertEquals(StreamResponse.EventCase.SUMMARY, kinds.get(kinds.size() - 1));
        assertEquals(2, whole.getOutputsCount());
        IntStream.range(0, 2).forEach(index -> {
            assertEquals(40, whole.getOutputs(index).getTokenIdsCount());
            assertEquals(whole.getOutputs(index).getTokenIdsList(), tokens.get(index));
            assertEquals(whole.getOutputs(index).getText(), texts.get(index).toString());
        });
    }

    @Test
    void aStreamThatHasEndedSaysSoAgainAndAgain() {
        try (ServerStream<StreamResponse> events = client.stream(Requests.stream(1).build())) {
            while (events.hasNext()) {
                assertTrue(events.hasNext(), "asking twice takes nothing");
                events.next();
            }
            assertFalse(events.hasNext());
            assertThrows(NoSuchElementException.class, events::next);
        }
    }

    @Test
    void aConversationIsAnswered() {
        ChatMessage question =
                ChatMessage.newBuilder().setRole("user").setContent("what is 3 + 4?").build();
        GenerateResponse answer = client.generate(GenerateRequest.newBuilder()
                .setChat(ChatPrompt.newBuilder().addMessages(question))
                .setSampling(Requests.greedy())
                .build());
        assertTrue(answer.getOutputs(0).getText().contains("7"), answer.getOutputs(0).getText());
        assertEquals(FinishReason.FINISH_REASON_EOS, answer.getOutputs(0).getFinish().getReason());
    }

    @Test
    void tokensAndTextGoBothWays() {
        List<Integer> ids = client.tokenize(TokenizeRequest.newBuilder().setText(Requests.PROMPT).build())
                .getTokenIdsList();
        assertEquals(
                Requests.PROMPT,
                client.detokenize(DetokenizeRequest.newBuilder().addAllTokenIds(ids).build()).getText());
    }

    @Test
    void everyBadFieldIsNamed() {
        SamplingParams bad = SamplingParams.newBuilder().setTemperature(-1).setTopP(2).build();
        RefusedException.InvalidRequest error = assertThrows(
                RefusedException.InvalidRequest.class,
                () -> client.generate(
                        Requests.generate(1).setRequestId("bad-1").setSampling(bad).build()));
        assertEquals(
                List.of("sampling.temperature", "sampling.top_p"),
                error.violations().stream().map(Violation::field).toList());
        assertEquals("INVALID_FIELD", error.reason());
        assertEquals(Status.Code.INVALID_ARGUMENT, error.code());
        assertEquals("bad-1", error.requestId());
        assertTrue(error.getMessage().contains("sampling.top_p"), error.getMessage());
        assertTrue(error.getCause() instanceof StatusRuntimeException);
    }

    @Test
    void aStreamFailsWithTheSameException() {
        try (ServerStream<StreamResponse> events =
                client.stream(Requests.stream(1).setModel("another").build())) {
            assertThrows(RefusedException.UnknownModel.class, events::hasNext);
            assertThrows(RefusedException.UnknownModel.class, events::next);
        }
    }

    @Test
    void whatTheServerDoesNotHaveIsNamed() {
        RefusedException.Unsupported error = assertThrows(
                RefusedException.Unsupported.class,
                () -> client.generate(Requests.generate(1).setAdapter("lora").setPriority(1).build()));
        assertEquals(List.of("adapter", "priority"), error.fields().stream().sorted().toList());
    }

    @Test
    void aPromptThatIsTooLongIsRefusedWithBothNumbers() {
        RefusedException.PromptTooLong error = assertThrows(
                RefusedException.PromptTooLong.class,
                () -> client.generate(Requests.generate(1).setPrompt("time ".repeat(20000)).build()));
        assertEquals(2, error.metadata().size(), error.metadata().toString());
    }

    @Test
    void stubsOfGrpcWorkOnTheSameConnectionAndTheirErrorsCanBeTyped() {
        var stub = InferenceServiceGrpc.newBlockingStub(client.channel());
        assertEquals(1, stub.generate(Requests.generate(1).build()).getOutputsCount());
        StatusRuntimeException error = assertThrows(
                StatusRuntimeException.class,
                () -> stub.generate(Requests.generate(1).setModel("another").build()));
        assertEquals(RefusedException.UnknownModel.class, PenstockException.from(error).getClass());
    }

    @Test
    void aMessageAboveTheClientsLimitIsRefusedOnBothWays() throws Exception {
        try (PenstockClient small = PenstockClient.builder(DemoServer.shared().address())
                .maxMessageBytes(1000)
                .build()) {
            assertEquals(1, small.generate(Requests.generate(1).build()).getOutputsCount());
            assertThrows(
                    LimitExceededException.class,
                    () -> small.generate(Requests.generate(1000).build()));
            String longText = "time ".repeat(400);
            assertThrows(
                    LimitExceededException.class,
                    () -> small.generate(Requests.generate(1).setPrompt(longText).build()));
            assertThrows(
                    LimitExceededException.class,
                    () -> small.stream(Requests.stream(1).setPrompt(longText).build()).hasNext());
        }
    }

    @Test
    void aMessageAboveTheServersLimitIsRefusedByTheServer() {
        LimitExceededException error = assertThrows(
                LimitExceededException.class,
                () -> client.generate(Requests.generate(1).setPrompt("time ".repeat(2 << 20)).build()));
        assertEquals("MESSAGE_TOO_LARGE", error.reason());
    }
}
