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
import java.util.regex.Pattern;
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
    /** Not in quotes; and no file has as many bytes as a number of 19 digits, with which sums might overflow. */
    private static final Pattern WHOLE = Pattern.compile("\\d{1,18}");

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
            for (JsonElement name : member(index, "weight_map").getAsJsonObject().asMap().values()) {
                names.add(text(name));
            }
        } catch (JsonParseException | IllegalStateException error) {
            throw new IOException(folder.resolve(INDEX) + " is no index of safetensors files", error);
        }
        if (names.isEmpty()) {
            throw new IOException(folder.resolve(INDEX) + " names no files");
        }
        for (String name : names) {
            if (name.isEmpty() || name.equals("..") || name.indexOf('\0') >= 0
                    || !Path.of(name).equals(Path.of(name).getFileName())) {
                throw new IOException(folder.resolve(INDEX) + " names the file \"" + name + "\", which is not in its"
                        + " directory");
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
        } catch (JsonParseException error) {
            throw new IOException(file + " is no complete safetensors file: its header is not JSON", error);
        } catch (IllegalStateException | IOException error) {
            throw new IOException(file + " is no complete safetensors file: " + error.getMessage(), error);
        }
    }

    private static Tensor tensor(Path file, long dataStart, String name, JsonObject fields) throws IOException {
        String spelled;
        List<Long> shape;
        List<Long> offsets;
        try {
            spelled = text(member(fields, "dtype"));
            shape = numbers(member(fields, "shape"));
            offsets = numbers(member(fields, "data_offsets"));
        } catch (IllegalStateException error) {
            throw new IOException("the entry of " + name + " is damaged", error);
        }
        DataType dtype = DTYPES.get(spelled);
        if (dtype == null) {
            throw new IOException(name + " is " + spelled + ", which cannot be sent; convert it to one of "
                    + String.join(", ", new TreeSet<>(DTYPES.keySet())));
        }
        long numBytes = numBytes(dtype, shape);
        if (numBytes < 0 || offsets.size() != 2 || offsets.get(1) - offsets.get(0) != numBytes) {
            throw new IOException("the shape " + shape + " of " + name + " does not fit its place " + offsets);
        }
        return new Tensor(name, dtype, shape, file, dataStart + offsets.get(0), numBytes);
    }

    /** The size of a tensor; -1 if no file can hold it. An empty one has no bytes, however large other lengths are. */
    private static long numBytes(DataType dtype, List<Long> shape) {
        if (shape.contains(0L)) {
            return 0;
        }
        try {
            long numBytes = itemBytes(dtype);
            for (long length : shape) {
                numBytes = Math.multiplyExact(numBytes, length);
            }
            return numBytes;
        } catch (ArithmeticException tooLarge) {
            return -1;
        }
    }

    private static long itemBytes(DataType dtype) {
        return switch (dtype) {
            case DATA_TYPE_F32 -> 4;
            case DATA_TYPE_BF16, DATA_TYPE_F16 -> 2;
            default -> 1;
        };
    }

    /** Lengths and places; throws IllegalStateException for anything but whole numbers from 0 on. */
    private static List<Long> numbers(JsonElement list) {
        return StreamSupport.stream(list.getAsJsonArray().spliterator(), false)
                .map(SafetensorsFile::number)
                .toList();
    }

    private static long number(JsonElement value) {
        if (!value.isJsonPrimitive() || !WHOLE.matcher(value.toString()).matches()) {
            throw new IllegalStateException(value + " is no length and no place");
        }
        return value.getAsLong();
    }

    private static String text(JsonElement value) {
        if (!value.isJsonPrimitive() || !value.getAsJsonPrimitive().isString()) {
            throw new IllegalStateException(value + " is no text");
        }
        return value.getAsString();
    }

    private static JsonElement member(JsonObject object, String name) {
        if (!object.has(name)) {
            throw new IllegalStateException(name + " is missing");
        }
        return object.get(name);
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
