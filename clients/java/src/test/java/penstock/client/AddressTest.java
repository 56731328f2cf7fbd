package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class AddressTest {
    @ParameterizedTest
    @CsvSource({
        "127.0.0.1:50051, 127.0.0.1:50051, true",
        "localhost, localhost:50051, true",
        "[::1]:80, [::1]:80, true",
        "gpu1.example, gpu1.example:50051, false",
        "10.0.0.7:1234, 10.0.0.7:1234, false",
        "127.0.0.1.example, 127.0.0.1.example:50051, false",
        "unix:/run/penstock.sock, unix:/run/penstock.sock, true",
        "dns:///localhost:50051, dns:///localhost:50051, false",
    })
    void anAddressHasAPortAndIsOnThisMachineOrNot(String given, String target, boolean local) {
        assertEquals(new Address(target, local), Address.parse(given));
    }

    @ParameterizedTest
    @ValueSource(strings = {"", "host:", "host:0", "host:65536", "::1", "a:1,b:2", "http://host", "host /x"})
    void whatIsNoAddressIsRefused(String given) {
        assertThrows(IllegalArgumentException.class, () -> PenstockClient.builder(given));
    }

    @Test
    void aKeyLeavesThisMachineInPlaintextOnlyWhereThatIsAllowed() throws Exception {
        ClientBuilder remote = PenstockClient.builder("gpu1.example").key("psk_1");
        assertThrows(IllegalStateException.class, remote::build);
        remote.allowPlaintextKey().build().close();
        PenstockClient.builder("gpu1.example").key("psk_1").tls(Tls.wellKnown()).build().close();
        PenstockClient.builder("localhost").key("psk_1").build().close();
    }

    @Test
    void aKeyIsOneWord() {
        ClientBuilder builder = PenstockClient.builder("localhost");
        assertThrows(IllegalArgumentException.class, () -> builder.key(""));
        assertThrows(IllegalArgumentException.class, () -> builder.key("two words"));
        assertThrows(IllegalArgumentException.class, () -> builder.key("line\n"));
    }
}
