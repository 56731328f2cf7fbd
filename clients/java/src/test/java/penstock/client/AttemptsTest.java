package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.rpc.RetryInfo;
import io.grpc.Deadline;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

class AttemptsTest {
    private static final Duration UNTIL_ANYTHING = Duration.ZERO;

    private static PenstockException failure(Status.Code code, Duration retryAfter) {
        RetryInfo again = RetryInfo.newBuilder()
                .setRetryDelay(com.google.protobuf.Duration.newBuilder().setSeconds(retryAfter.toSeconds()))
                .build();
        return PenstockException.from(StatusProto.toStatusRuntimeException(com.google.rpc.Status.newBuilder()
                .setCode(code.value())
                .addDetails(Any.pack(again))
                .build()));
    }

    @Test
    void thereAreFiveAttemptsAndTheirWaitsGrow() {
        Attempts attempts = Attempts.at(true, Optional.empty());
        for (long most : new long[] {500, 1000, 2000, 4000}) {
            long delay = attempts.delayAfter(failure(Status.Code.UNAVAILABLE, Duration.ofSeconds(3)))
                    .orElseThrow()
                    .toMillis();
            assertTrue(delay >= 3000 && delay < 3000 + most, delay + " ms");
        }
        assertEquals(Optional.empty(), attempts.delayAfter(failure(Status.Code.UNAVAILABLE, UNTIL_ANYTHING)));
    }

    @ParameterizedTest
    @EnumSource(mode = EnumSource.Mode.EXCLUDE, names = {"OK", "UNAVAILABLE", "CANCELLED"})
    void onlyWhatTheServerDidNotTakeIsMadeAgain(Status.Code code) {
        Attempts attempts = Attempts.at(true, Optional.empty());
        assertEquals(Optional.empty(), attempts.delayAfter(failure(code, UNTIL_ANYTHING)));
    }

    @Test
    void aLongWaitIsLeftToTheCaller() {
        Attempts attempts = Attempts.at(true, Optional.empty());
        assertEquals(
                Optional.empty(),
                attempts.delayAfter(failure(Status.Code.UNAVAILABLE, Duration.ofSeconds(31))));
    }

    @Test
    void aWaitEndsBeforeTheDeadline() {
        Attempts attempts = Attempts.at(true, Optional.of(Deadline.after(5, TimeUnit.SECONDS)));
        assertEquals(
                Optional.empty(), attempts.delayAfter(failure(Status.Code.UNAVAILABLE, Duration.ofSeconds(6))));
    }

    @Test
    void retriesCanBeSwitchedOff() {
        Attempts attempts = Attempts.at(false, Optional.empty());
        assertEquals(Optional.empty(), attempts.delayAfter(failure(Status.Code.UNAVAILABLE, UNTIL_ANYTHING)));
    }
}
