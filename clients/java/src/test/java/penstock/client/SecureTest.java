package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Optional;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import penstock.v1.GenerateResponse;
import penstock.v1.PauseRequest;
import penstock.v1.StreamResponse;

/** A server with TLS and keys, whose certificate is for localhost and 127.0.0.1. */
class SecureTest {
    private static final Tls TRUSTING = Tls.trusting(DemoServer.CERTS.resolve("ca.pem"));

    @TempDir
    static Path folder;

    private static DemoServer server;
    private static String operator;
    private static String user;
    private static String hasty;

    @BeforeAll
    static void serve() throws Exception {
        operator = key("operator", "--role", "infer", "--role", "control");
        user = key("user");
        hasty = key("hasty", "--requests-per-minute", "1");
        server = DemoServer.start(
                "--tls-cert", DemoServer.CERTS.resolve("server.pem").toString(),
                "--tls-key", DemoServer.CERTS.resolve("server.key").toString(),
                "--keys", folder.resolve("keys.json").toString(),
                "--unix-socket", folder.resolve("s").toString());
    }

    @AfterAll
    static void end() {
        server.close();
    }

    private static String key(String name, String... options) throws Exception {
        String[] words = {"keys", "add", name, "--file", folder.resolve("keys.json").toString()};
        String[] all = java.util.Arrays.copyOf(words, words.length + options.length);
        System.arraycopy(options, 0, all, words.length, options.length);
        return DemoServer.run(all);
    }

    private static ClientBuilder builder(String key) throws IOException {
        return PenstockClient.builder(server.address()).tls(TRUSTING).key(key).withoutRetries();
    }

    private static void assertGenerates(PenstockClient client) {
        GenerateResponse answer = client.generate(Requests.generate(2).build());
        assertEquals(2, answer.getUsage().getCompletionTokens());
        try (ServerStream<StreamResponse> events = client.stream(Requests.stream(2).build())) {
            assertTrue(events.next().hasStarted());
        }
    }

    @Test
    void aKeyOverTlsIsTaken() throws IOException, InterruptedException {
        try (PenstockClient client = builder(user).build()) {
            client.waitReady(Duration.ofSeconds(30));
            assertGenerates(client);
        }
    }

    @Test
    void aServerOfAnotherAuthorityIsNotTrusted() throws IOException {
        Path other = DemoServer.CERTS.resolve("other_ca.pem");
        for (Tls tls : new Tls[] {Tls.trusting(other), Tls.wellKnown()}) {
            try (PenstockClient client = builder(user).tls(tls).build()) {
                assertThrows(UnavailableException.Unreachable.class, client::load);
            }
        }
    }

    @Test
    void theNameInTheCertificateCounts() throws IOException {
        try (PenstockClient client = builder(user).tls(TRUSTING.withServerName("elsewhere")).build()) {
            assertThrows(UnavailableException.Unreachable.class, client::load);
        }
        try (PenstockClient client = builder(user).tls(TRUSTING.withServerName("localhost")).build()) {
            assertTrue(client.load().getKvPagesTotal() > 0);
        }
    }

    @Test
    void plaintextIsNotAnsweredByAServerWithTls() throws IOException {
        try (PenstockClient client = PenstockClient.builder(server.address()).withoutRetries().build()) {
            assertThrows(UnavailableException.Unreachable.class, client::load);
        }
    }

    @Test
    void aUnixSocketIsReachedToo() throws IOException {
        try (PenstockClient client =
                PenstockClient.builder("unix:" + folder.resolve("s")).key(user).build()) {
            assertGenerates(client);
        }
    }

    @Test
    void withoutAKeyOrWithAWrongOneNothingIsAnswered() throws IOException {
        try (PenstockClient client =
                PenstockClient.builder(server.address()).tls(TRUSTING).build()) {
            assertThrows(RefusedException.Unauthenticated.class, client::load);
        }
        try (PenstockClient client = builder("psk_wrong").build()) {
            assertThrows(RefusedException.Unauthenticated.class, client::load);
            try (ServerStream<StreamResponse> events = client.stream(Requests.stream(1).build())) {
                assertThrows(RefusedException.Denied.class, events::hasNext);
            }
        }
    }

    @Test
    void aKeyAllowsWhatItsRolesSay() throws IOException {
        try (PenstockClient client = builder(user).build()) {
            assertThrows(
                    RefusedException.Forbidden.class, () -> client.pause(PauseRequest.getDefaultInstance()));
        }
        try (PenstockClient client = builder(operator).build()) {
            client.pause(PauseRequest.getDefaultInstance());
            client.resume();
        }
    }

    @Test
    void aUsedUpRateIsToldAtOnceWithTheTimeToComeBack() throws IOException {
        try (PenstockClient client =
                PenstockClient.builder(server.address()).tls(TRUSTING).key(hasty).build()) {
            client.generate(Requests.generate(1).build());
            UnavailableException.RateLimited error = assertThrows(
                    UnavailableException.RateLimited.class,
                    () -> client.generate(Requests.generate(1).build()));
            Optional<Duration> wait = error.retryAfter();
            assertTrue(wait.orElseThrow().compareTo(Duration.ofSeconds(1)) > 0, wait.toString());
        }
    }

    @Test
    void filesThatCannotBeUsedAreRefusedBeforeAnythingIsSent() throws IOException {
        Path ca = DemoServer.CERTS.resolve("ca.pem");
        assertThrows(
                IOException.class,
                () -> builder(user).tls(Tls.trusting(folder.resolve("missing"))));
        ClientBuilder noCertificates = builder(user).tls(Tls.trusting(folder.resolve("keys.json")));
        assertThrows(IllegalArgumentException.class, noCertificates::build);
        assertThrows(
                IllegalArgumentException.class,
                () -> new Tls(Optional.empty(), Optional.of(ca), Optional.empty(), Optional.empty()));
    }
}
