package penstock.client;

import io.grpc.Deadline;
import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/**
 * The attempts at one call. It is made again only if the server did not take it: after UNAVAILABLE, or where the
 * connection was lost before anything of the answer came.
 *
 * <p>gRPC's own retries, by a service config, are not used: gRPC for Java also repeats every other status whose
 * trailers have grpc-retry-pushback-ms. QUEUE_FULL and RATE_LIMITED would then keep the caller waiting for minutes
 * instead of being reported.
 */
final class Attempts {
    private static final int MOST = 5;
    private static final long FIRST_MILLIS = 500;
    private static final Duration LONGEST = Duration.ofSeconds(30);

    private final int most;
    private final Optional<Deadline> deadline;
    private int made;

    private Attempts(int most, Optional<Deadline> deadline) {
        this.most = most;
        this.deadline = deadline;
    }

    /** The attempts at a call that must have ended by the deadline. */
    static Attempts at(boolean retries, Optional<Deadline> deadline) {
        return new Attempts(retries ? MOST : 1, deadline);
    }

    /**
     * Says how long to wait before the call is made again: what the server asks for, and in addition a random part of a
     * time that doubles from 0.5 s on, so that callers who were refused together do not come back together. It is empty
     * if the failure is final.
     */
    Optional<Duration> delayAfter(PenstockException failure) {
        made++;
        boolean notTaken =
                failure.code() == Status.Code.UNAVAILABLE || failure instanceof UnavailableException.Unreachable;
        Duration asked = failure.retryAfter().orElse(Duration.ZERO);
        if (!notTaken || failure instanceof CancelledException || made >= most || asked.compareTo(LONGEST) > 0) {
            return Optional.empty();
        }
        Duration delay = asked.plusMillis(ThreadLocalRandom.current().nextLong(FIRST_MILLIS << (made - 1)));
        boolean fits = deadline.map(end -> end.timeRemaining(TimeUnit.NANOSECONDS) > delay.toNanos()).orElse(true);
        return fits ? Optional.of(delay) : Optional.empty();
    }
}
