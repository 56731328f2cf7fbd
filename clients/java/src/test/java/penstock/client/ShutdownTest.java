package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Path;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.MethodOrderer;
import org.junit.jupiter.api.Order;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestMethodOrder;
import penstock.v1.SamplingParams;
import penstock.v1.StreamResponse;

/** A server that asks for certificates of its clients, and at last is told to end. */
@TestMethodOrder(MethodOrderer.OrderAnnotation.class)
class ShutdownTest {
    private static final int OUTPUTS = 8;
    private static final int TOKENS = 1000;
    private static final Tls TRUSTING = Tls.trusting(certificate("ca.pem"));
    private static DemoServer server;

    private static Path certificate(String name) {
        return DemoServer.CERTS.resolve(name);
    }

    @BeforeAll
    static void serve() throws IOException {
        server = DemoServer.start(
                "--tls-cert", certificate("server.pem").toString(),
                "--tls-key", certificate("server.key").toString(),
                "--client-ca", certificate("ca.pem").toString(),
                "--grace", "120");
    }

    @AfterAll
    static void end() {
        server.close();
    }

    private static PenstockClient client(Tls tls) throws IOException {
        return PenstockClient.builder(server.address()).tls(tls).withoutRetries().build();
    }

    private static PenstockClient alice() throws IOException {
        return client(TRUSTING.withCertificate(certificate("client.pem"), certificate("client.key")));
    }

    @Test
    @Order(1)
    void aClientCertificateIsTaken() throws IOException {
        try (PenstockClient client = alice()) {
            assertTrue(client.load().getKvPagesTotal() > 0);
        }
    }

    @Test
    @Order(1)
    void withoutACertificateOrWithAStrangersNobodyIsServed() throws IOException {
        Tls stranger = TRUSTING.withCertificate(certificate("stranger.pem"), certificate("stranger.key"));
        for (Tls tls : new Tls[] {TRUSTING, stranger}) {
            try (PenstockClient client = client(tls)) {
                assertThrows(UnavailableException.Unreachable.class, client::load);
            }
        }
    }

    @Test
    @Order(2)
    void onSigtermARunningStreamEndsAsAWholeAndNewCallsAreUnavailable() throws Exception {
        SamplingParams many = Requests.greedy().setN(OUTPUTS).build();
        try (PenstockClient client = alice();
                ServerStream<StreamResponse> running =
                        client.stream(Requests.stream(TOKENS).setSampling(many).build())) {
            assertTrue(running.next().hasStarted());
            server.terminate();
            Requests.waitUntil("new calls are refused", () -> isRefused(client));
            int tokens = 0;
            StreamResponse last = null;
            while (running.hasNext()) {
                last = running.next();
                tokens += last.getDelta().getTokenIdsCount();
            }
            assertTrue(last.hasSummary());
            assertEquals(OUTPUTS * TOKENS, tokens);
            assertEquals(OUTPUTS * TOKENS, last.getSummary().getUsage().getCompletionTokens());
        }
        assertEquals(0, server.exitCode());
    }

    private static boolean isRefused(PenstockClient client) {
        try {
            client.generate(Requests.generate(1).build());
            return false;
        } catch (UnavailableException refused) { // as DRAINING, or because nobody listens any more
            return true;
        }
    }
}
