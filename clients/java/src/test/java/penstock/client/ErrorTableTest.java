package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.io.IOException;
import java.nio.file.Files;
import java.util.Map;
import java.util.TreeMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** Every reason of docs/reference/errors.md becomes the exception whose name says the same. */
class ErrorTableTest {
    private static final Pattern ROW = Pattern.compile("(?m)^\\| ([A-Z_]+) \\| ([A-Z_]+) \\|");

    /** Reasons whose exception has another name, because there is nothing to do about them but what the class says. */
    private static final Map<String, Class<?>> OTHERS = Map.ofEntries(
            Map.entry("INVALID_FIELD", RefusedException.InvalidRequest.class),
            Map.entry("UNSUPPORTED_FEATURE", RefusedException.Unsupported.class),
            Map.entry("INVALID_TENSORS", RefusedException.TensorsRefused.class),
            Map.entry("CHECKSUM_MISMATCH", RefusedException.TensorsRefused.class),
            Map.entry("ADAPTER_EXISTS", RefusedException.PreconditionFailed.class),
            Map.entry("ADAPTER_FORMAT", RefusedException.AdapterRefused.class),
            Map.entry("TOO_MANY_ADAPTERS", LimitExceededException.class),
            Map.entry("PROFILE_FAILED", ServerException.class),
            Map.entry("PAUSED", RefusedException.PreconditionFailed.class),
            Map.entry("PAUSE_TAKEN_BACK", ConflictException.class),
            Map.entry("REQUEST_ABORTED", ConflictException.class),
            Map.entry("UNKNOWN_SERVICE", RefusedException.class),
            Map.entry("MESSAGE_TOO_LARGE", LimitExceededException.class),
            Map.entry("STALLED_SENDER", LimitExceededException.class),
            Map.entry("STALLED_READER", LimitExceededException.class),
            Map.entry("WEIGHTS_INCOMPLETE", UnavailableException.class),
            Map.entry("UNAVAILABLE", UnavailableException.class),
            Map.entry("NON_FINITE_LOGITS", ServerException.class),
            Map.entry("GENERATION_FAILED", ServerException.class),
            Map.entry("ENGINE_FAILURE", ServerException.class),
            Map.entry("INTERNAL", ServerException.class));

    private static PenstockException failure(String reason, Status.Code code) {
        return failure("penstock", reason, code);
    }

    private static PenstockException failure(String domain, String reason, Status.Code code) {
        ErrorInfo info = ErrorInfo.newBuilder().setReason(reason).setDomain(domain).build();
        return PenstockException.from(StatusProto.toStatusRuntimeException(com.google.rpc.Status.newBuilder()
                .setCode(code.value())
                .addDetails(Any.pack(info))
                .build()));
    }

    @Test
    void everyReasonOfThePageHasItsException() throws IOException {
        String page = Files.readString(DemoServer.ROOT.resolve("docs/reference/errors.md"));
        Map<String, String> found = new TreeMap<>();
        Map<String, String> expected = new TreeMap<>();
        for (Matcher row = ROW.matcher(page); row.find(); ) {
            String reason = row.group(1);
            Class<?> kind = failure(reason, Status.Code.valueOf(row.group(2))).getClass();
            found.put(reason, kind.getSimpleName().toUpperCase());
            Class<?> other = OTHERS.get(reason);
            expected.put(reason, other == null ? reason.replace("_", "") : other.getSimpleName().toUpperCase());
        }
        assertEquals(expected, found);
        assertTrue(found.size() > 35, found.size() + " reasons");
        assertTrue(found.keySet().containsAll(OTHERS.keySet()));
    }

    @ParameterizedTest
    @CsvSource({
        "INVALID_ARGUMENT, InvalidRequest",
        "NOT_FOUND, RefusedException",
        "UNIMPLEMENTED, Unsupported",
        "UNAVAILABLE, Unreachable",
        "CANCELLED, Unreachable",
        "RESOURCE_EXHAUSTED, LimitExceededException",
        "DEADLINE_EXCEEDED, DeadlineExceededException",
        "INTERNAL, ServerException",
        "UNKNOWN, ServerException",
        "DATA_LOSS, ServerException",
    })
    void aFailureOfGrpcItselfHasTheExceptionOfItsStatus(Status.Code code, String kind) {
        PenstockException error = PenstockException.from(Status.fromCode(code).asRuntimeException());
        assertEquals(kind, error.getClass().getSimpleName());
        assertEquals(code, error.code());
        assertEquals("", error.reason());
        assertEquals(code.name(), error.getMessage());
    }

    @Test
    void aProxysReasonIsNotTakenForPenstocks() {
        PenstockException error = failure("proxy.example", "QUEUE_FULL", Status.Code.RESOURCE_EXHAUSTED);
        assertEquals(LimitExceededException.class, error.getClass());
        assertEquals("", error.reason());
    }

    @Test
    void aReasonThatIsNewHasTheExceptionOfItsStatus() {
        assertEquals(
                UnavailableException.class,
                failure("SOMETHING_NEW", Status.Code.UNAVAILABLE).getClass());
    }
}
