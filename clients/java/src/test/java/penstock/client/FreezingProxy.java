package penstock.client;

import java.io.IOException;
import java.io.InputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;

/** A TCP proxy that carries nothing any more when it is told to, like a network whose cable was pulled. */
final class FreezingProxy implements AutoCloseable {
    private final Queue<Socket> open = new ConcurrentLinkedQueue<>();
    private final ServerSocket listener;
    private final int port;
    private volatile boolean frozen;

    FreezingProxy(int port) throws IOException {
        this.port = port;
        this.listener = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
        daemon(this::accept);
    }

    String address() {
        return "127.0.0.1:" + listener.getLocalPort();
    }

    void freeze() {
        frozen = true;
    }

    @Override
    public void close() throws IOException {
        listener.close();
        for (Socket socket : open) {
            socket.close();
        }
    }

    private interface Work {
        void run() throws IOException;
    }

    private void accept() throws IOException {
        while (true) {
            Socket near = listener.accept();
            Socket far = new Socket(InetAddress.getLoopbackAddress(), port);
            open.add(near);
            open.add(far);
            daemon(() -> forward(near, far));
            daemon(() -> forward(far, near));
        }
    }

    private void forward(Socket source, Socket sink) throws IOException {
        InputStream from = source.getInputStream();
        byte[] buffer = new byte[65_536];
        for (int length = from.read(buffer); length >= 0; length = from.read(buffer)) {
            if (!frozen) {
                sink.getOutputStream().write(buffer, 0, length);
            }
        }
        sink.close();
    }

    private static void daemon(Work work) {
        Thread thread = new Thread(() -> {
            try {
                work.run();
            } catch (IOException closed) {
                // One of the two ends was closed.
            }
        });
        thread.setDaemon(true);
        thread.start();
    }
}
