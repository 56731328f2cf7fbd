package penstock.client;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.JsonParser;
import java.io.EOFException;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;
import penstock.v1.DataType;

/**
 * Reads what tensors safetensors files hold, and where. The format is 8 bytes of little-endian length, a JSON object
 * {name: {dtype, shape, data_offsets}}, and the data.
 */
final class SafetensorsFile {
    private static final String SINGLE = "model.safetensors";
    private static final String INDEX = "model.safetensors.index.json";
    private static final long MAX_HEADER_BYTES = 100_000_000;
    private static final Map<String, DataType> DTYPES = Map.of(
            "BF16", DataType.DATA_TYPE_BF16,
            "F16", DataType.DATA_TYPE_F16,
            "F32", DataType.DATA_TYPE_F32,
            "F8_E4M3", DataType.DATA_TYPE_F8_E4M3,
            "F8_E5M2", DataType.DATA_TYPE_F8_E5M2,
            "I8", DataType.DATA_TYPE_I8);

    /** One tensor, whose bytes lie in a file from an offset on. */
    record Tensor(String name, DataType dtype, List<Long> shape, Path file, long start, long numBytes) {
        /** Reads as many bytes as the array has, from an offset within the tensor on. */
        void read(FileChannel channel, long offset, byte[] into) throws IOException {
            ByteBuffer rest = ByteBuffer.wrap(into);
            while (rest.hasRemaining()) {
                if (channel.read(rest, start + offset + rest.position()) < 0) {
                    throw new EOFException(file + " has become shorter while it was read");
                }
            }
        }
    }

    private SafetensorsFile() {}

    /**
     * Lists the tensors of a file, or of a directory: those of model.safetensors, else of the files that
     * model.safetensors.index.json names, else of all *.safetensors in it. Reads headers only.
     *
     * @throws IOException for what cannot be read, and for what is no complete safetensors file
     */
    static List<Tensor> open(Path path) throws IOException {
        Map<String, Tensor> found = new LinkedHashMap<>();
        for (Path file : files(path)) {
            for (Tensor tensor : tensors(file)) {
                if (found.putIfAbsent(tensor.name(), tensor) != null) {
                    throw new IOException("the tensor " + tensor.name() + " is in " + file + " and in another file");
                }
            }
        }
        return List.copyOf(found.values());
    }

    private static List<Path> files(Path path) throws IOException {
        if (!Files.isDirectory(path)) {
            return List.of(path);
        }
        if (Files.isRegularFile(path.resolve(SINGLE))) {
            return List.of(path.resolve(SINGLE));
        }
        if (Files.isRegularFile(path.resolve(INDEX))) {
            return indexed(path);
        }
        try (Stream<Path> all = Files.list(path)) {
            List<Path> found =
                    all.filter(file -> file.toString().endsWith(".safetensors")).sorted().toList();
            if (found.isEmpty()) {
                throw new NoSuchFileException(path.toString(), null, "it holds no *.safetensors files");
            }
            return found;
        }
    }

    private static List<Path> indexed(Path folder) throws IOException {
        TreeSet<String> names = new TreeSet<>();
        try {
            JsonObject index = object(Files.readString(folder.resolve(INDEX)));
            for (JsonElement name : index.getAsJsonObject("weight_map").asMap().values()) {
                names.add(name.getAsString());
            }
        } catch (JsonParseException | IllegalStateException | NullPointerException error) {
            throw new IOException(folder.resolve(INDEX) + " is no index of safetensors files", error);
        }
        for (String name : names) {
            if (!Path.of(name).equals(Path.of(name).getFileName())) {
                throw new IOException(folder.resolve(INDEX) + " names a file outside its directory: " + name);
            }
        }
        return names.stream().map(folder::resolve).toList();
    }

    private static List<Tensor> tensors(Path file) throws IOException {
        try (FileChannel channel = FileChannel.open(file)) {
            long size = channel.size();
            ByteBuffer length = filled(channel, ByteBuffer.allocate(8), 0).order(ByteOrder.LITTLE_ENDIAN);
            long start = 8 + length.getLong(0);
            if (start <= 8 || start > Math.min(size, MAX_HEADER_BYTES)) {
                throw new IOException("its header would end at byte " + start + ", and it has " + size);
            }
            ByteBuffer header = filled(channel, ByteBuffer.allocate((int) start - 8), 8);
            List<Tensor> found = new ArrayList<>();
            long end = start;
            for (Map.Entry<String, JsonElement> entry :
                    object(new String(header.array(), StandardCharsets.UTF_8)).entrySet()) {
                if (!entry.getKey().equals("__metadata__")) {
                    Tensor tensor = tensor(file, start, entry.getKey(), entry.getValue().getAsJsonObject());
                    found.add(tensor);
                    end = Math.max(end, tensor.start() + tensor.numBytes());
                }
            }
            if (end != size) {
                throw new IOException("its header describes " + end + " bytes, and it has " + size);
            }
            return found;
        } catch (NoSuchFileException missing) {
            throw missing;
        } catch (JsonParseException | IllegalStateException | IOException error) {
            throw new IOException(file + " is no complete safetensors file: " + error.getMessage(), error);
        }
    }

    private static Tensor tensor(Path file, long dataStart, String name, JsonObject fields) throws IOException {
        String spelled;
        List<Long> shape;
        List<Long> offsets;
        try {
            spelled = fields.get("dtype").getAsString();
            shape = numbers(fields.get("shape"));
            offsets = numbers(fields.get("data_offsets"));
        } catch (IllegalStateException | NullPointerException | NumberFormatException error) {
            throw new IOException("the entry of " + name + " is damaged", error);
        }
        DataType dtype = DTYPES.get(spelled);
        if (dtype == null) {
            throw new IOException(name + " is " + spelled + ", which cannot be sent; convert it to one of "
                    + String.join(", ", new TreeSet<>(DTYPES.keySet())));
        }
        long numBytes = itemBytes(dtype);
        for (long length : shape) {
            numBytes = Math.multiplyExact(numBytes, length);
        }
        if (offsets.size() != 2
                || offsets.get(0) < 0
                || shape.stream().anyMatch(length -> length < 0)
                || offsets.get(1) - offsets.get(0) != numBytes) {
            throw new IOException("the shape " + shape + " of " + name + " does not fit its place " + offsets);
        }
        return new Tensor(name, dtype, shape, file, dataStart + offsets.get(0), numBytes);
    }

    private static long itemBytes(DataType dtype) {
        return switch (dtype) {
            case DATA_TYPE_F32 -> 4;
            case DATA_TYPE_BF16, DATA_TYPE_F16 -> 2;
            default -> 1;
        };
    }

    private static List<Long> numbers(JsonElement list) {
        return StreamSupport.stream(list.getAsJsonArray().spliterator(), false)
                .map(JsonElement::getAsLong)
                .toList();
    }

    private static JsonObject object(String text) {
        return JsonParser.parseString(text).getAsJsonObject();
    }

    private static ByteBuffer filled(FileChannel channel, ByteBuffer buffer, long from) throws IOException {
        while (buffer.hasRemaining()) {
            if (channel.read(buffer, from + buffer.position()) < 0) {
                throw new EOFException("it ends at byte " + channel.size());
            }
        }
        return buffer;
    }
}
