package penstock.client;

import com.google.protobuf.ByteString;
import com.google.protobuf.UnsafeByteOperations;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.Deadline;
import io.grpc.Status;
import io.grpc.stub.ClientCalls;
import java.io.IOException;
import java.nio.channels.FileChannel;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.TimeUnit;
import java.util.function.Predicate;
import java.util.zip.CRC32C;
import penstock.client.SafetensorsFile.Tensor;
import penstock.v1.ControlServiceGrpc;
import penstock.v1.GetServerInfoRequest;
import penstock.v1.TensorChunk;
import penstock.v1.TensorManifest;
import penstock.v1.TensorSpec;

/** What a stream of tensors has, whatever it is for: the manifest with their checksums, and their bytes in chunks. */
final class TensorStream {
    /** A server may take larger chunks, but that would only cost memory. */
    private static final int MOST_CHUNK_BYTES = 8 << 20;

    private static final int PIECE_BYTES = 1 << 20;
    /** What the message of a chunk has besides the tensor's bytes, at most. */
    private static final int CHUNK_OVERHEAD_BYTES = 64;

    private final Channel channel;
    private final int mostChunkBytes;
    private final Optional<Deadline> deadline;

    /** The timeout begins now, and bounds the whole stream with the reading of files. */
    TensorStream(Channel channel, int maxMessageBytes, Optional<Duration> timeout) {
        this.channel = channel;
        this.mostChunkBytes = Math.min(MOST_CHUNK_BYTES, Math.max(maxMessageBytes - CHUNK_OVERHEAD_BYTES, 1));
        this.deadline = timeout.map(time -> Deadline.after(Timeouts.nanos(time), TimeUnit.NANOSECONDS));
    }

    /** The options of the call that sends the stream. */
    CallOptions options() {
        return deadline.map(CallOptions.DEFAULT::withDeadline).orElse(CallOptions.DEFAULT);
    }

    /** Describes the tensors. For checksums all of their bytes are read. */
    TensorManifest manifest(List<Tensor> tensors, boolean checksums) throws IOException {
        TensorManifest.Builder manifest = TensorManifest.newBuilder();
        for (Tensor tensor : tensors) {
            TensorSpec.Builder spec = manifest.addTensorsBuilder()
                    .setName(tensor.name())
                    .setDtype(tensor.dtype())
                    .addAllShape(tensor.shape());
            if (checksums) {
                spec.setCrc32C(checksum(tensor));
            }
        }
        return manifest.build();
    }

    /** Asks the server for the most bytes of a chunk. */
    int chunkBytes() {
        var method = ControlServiceGrpc.getGetServerInfoMethod();
        CallOptions options = deadline.map(CallOptions.DEFAULT::withDeadline)
                .orElseGet(() -> Timeouts.options(method, Optional.empty()));
        int most = ClientCalls.blockingUnaryCall(channel, method, options, GetServerInfoRequest.getDefaultInstance())
                .getMaxChunkBytes();
        // It is 0 for a server that takes no tensors, which says so itself when a stream begins; uint32 may look
        // negative.
        return most <= 0 ? mostChunkBytes : Math.min(most, mostChunkBytes);
    }

    /** Sends the chunks of all tensors. Returns false if the server has answered before it had them. */
    static boolean sendAll(
            List<Tensor> tensors, int chunkBytes, Predicate<TensorChunk> send, UpdateProgress progress)
            throws IOException {
        long total = totalBytes(tensors);
        long sent = 0;
        for (int index = 0; index < tensors.size(); index++) {
            Tensor tensor = tensors.get(index);
            try (FileChannel file = FileChannel.open(tensor.file())) {
                for (long offset = 0; offset < tensor.numBytes(); offset += chunkBytes) {
                    byte[] bytes = new byte[(int) Math.min(chunkBytes, tensor.numBytes() - offset)];
                    tensor.read(file, offset, bytes);
                    ByteString data = UnsafeByteOperations.unsafeWrap(bytes); // nobody changes these bytes any more
                    if (!send.test(TensorChunk.newBuilder()
                            .setTensorIndex(index)
                            .setOffset(offset)
                            .setData(data)
                            .build())) {
                        return false;
                    }
                    sent += bytes.length;
                    progress.sent(sent, total);
                }
            }
        }
        return true;
    }

    static long totalBytes(List<Tensor> tensors) {
        return tensors.stream().mapToLong(Tensor::numBytes).sum();
    }

    private int checksum(Tensor tensor) throws IOException {
        CRC32C crc = new CRC32C();
        try (FileChannel file = FileChannel.open(tensor.file())) {
            for (long offset = 0; offset < tensor.numBytes(); offset += PIECE_BYTES) {
                if (deadline.map(Deadline::isExpired).orElse(false)) {
                    throw Status.DEADLINE_EXCEEDED
                            .withDescription("the timeout passed while tensors were read for their checksums")
                            .asRuntimeException();
                }
                byte[] bytes = new byte[(int) Math.min(PIECE_BYTES, tensor.numBytes() - offset)];
                tensor.read(file, offset, bytes);
                crc.update(bytes, 0, bytes.length);
            }
        }
        return (int) crc.getValue();
    }
}
