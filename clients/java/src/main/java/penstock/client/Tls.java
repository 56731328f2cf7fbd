package penstock.client;

import io.grpc.ChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.io.IOException;
import java.nio.file.Path;
import java.util.Objects;
import java.util.Optional;

/**
 * How to secure a connection. All files are PEM; a private key must be PKCS #8 ("BEGIN PRIVATE KEY") without a
 * passphrase.
 *
 * @param ca certificates of the authorities to trust; empty = those that Java trusts
 * @param certificate the client's own certificate, first in its file, then intermediate ones; empty = none is shown
 * @param key the private key of the certificate; set exactly if the certificate is
 * @param serverName the name that the server's certificate has, if that is not the host of the address
 */
public record Tls(
        Optional<Path> ca, Optional<Path> certificate, Optional<Path> key, Optional<String> serverName) {

    /**
     * Checks that certificate and key come together.
     *
     * @throws IllegalArgumentException if only one of them is set
     */
    public Tls {
        if (certificate.isPresent() != key.isPresent()) {
            throw new IllegalArgumentException("a client certificate needs its key, and the other way around");
        }
    }

    /**
     * Trusts the authorities that Java trusts.
     *
     * @return TLS without a certificate of the client
     */
    public static Tls wellKnown() {
        return new Tls(Optional.empty(), Optional.empty(), Optional.empty(), Optional.empty());
    }

    /**
     * Trusts the authorities of a file, and no others.
     *
     * @param ca their certificates
     * @return TLS without a certificate of the client
     */
    public static Tls trusting(Path ca) {
        return new Tls(Optional.of(ca), Optional.empty(), Optional.empty(), Optional.empty());
    }

    /**
     * Shows a certificate of the client's own, for servers that ask for one (mTLS).
     *
     * @param certificate the client's certificate
     * @param key its private key
     * @return these settings with the certificate
     */
    public Tls withCertificate(Path certificate, Path key) {
        return new Tls(ca, Optional.of(certificate), Optional.of(key), serverName);
    }

    /**
     * Expects another name in the server's certificate than the host of the address.
     *
     * @param name the name
     * @return these settings with the name
     */
    public Tls withServerName(String name) {
        return new Tls(ca, certificate, key, Optional.of(Objects.requireNonNull(name)));
    }

    /** Reads the files. */
    ChannelCredentials credentials() throws IOException {
        TlsChannelCredentials.Builder found = TlsChannelCredentials.newBuilder();
        if (ca.isPresent()) {
            found.trustManager(ca.get().toFile());
        }
        if (certificate.isPresent()) {
            found.keyManager(certificate.get().toFile(), key.orElseThrow().toFile());
        }
        return found.build();
    }
}
