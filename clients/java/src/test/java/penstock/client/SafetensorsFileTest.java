package penstock.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import penstock.v1.DataType;

class SafetensorsFileTest {
    private static final String A = "\"a\": {\"dtype\": \"F32\", \"shape\": [2, 3], \"data_offsets\": [0, 24]}";

    @TempDir
    Path folder;

    private Path file(String name, String header, int dataBytes) throws IOException {
        byte[] text = header.getBytes(StandardCharsets.UTF_8);
        ByteBuffer bytes = ByteBuffer.allocate(8 + text.length + dataBytes).order(ByteOrder.LITTLE_ENDIAN);
        return Files.write(folder.resolve(name), bytes.putLong(text.length).put(text).array());
    }

    private List<String> names(Path path) throws IOException {
        return SafetensorsFile.open(path).stream().map(SafetensorsFile.Tensor::name).toList();
    }

    @Test
    void aTensorIsDescribedByTheHeader() throws IOException {
        String header = "{\"__metadata__\": {\"format\": \"pt\"}, " + A
                + ", \"b\": {\"dtype\": \"BF16\", \"shape\": [], \"data_offsets\": [24, 26]}}";
        Path file = file("x.safetensors", header, 26);
        long start = 8 + header.length();
        assertEquals(
                List.of(
                        new SafetensorsFile.Tensor("a", DataType.DATA_TYPE_F32, List.of(2L, 3L), file, start, 24),
                        new SafetensorsFile.Tensor("b", DataType.DATA_TYPE_BF16, List.of(), file, start + 24, 2)),
                SafetensorsFile.open(file));
    }

    @ParameterizedTest
    @CsvSource(delimiter = '|', value = {
        "{'a': {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 4]}}          | 4  | does not fit",
        "{'a': {'dtype': 'F32', 'shape': [-1], 'data_offsets': [4, 0]}}         | 4  | damaged",
        "{'a': {'dtype': 'F64', 'shape': [1], 'data_offsets': [0, 8]}}          | 8  | F64, which cannot be sent",
        "{'a': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}}          | 3  | describes",
        "{'a': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}}          | 5  | describes",
        "{'a': {'shape': [1], 'data_offsets': [0, 4]}}                          | 4  | damaged",
        "{'a': {'dtype': null, 'shape': [1], 'data_offsets': [0, 4]}}           | 4  | damaged",
        "{'a': {'dtype': {}, 'shape': [1], 'data_offsets': [0, 4]}}             | 4  | damaged",
        "{'a': {'dtype': 'F32', 'shape': [null], 'data_offsets': [0, 4]}}       | 4  | damaged",
        "{'a': {'dtype': 'I8', 'shape': [1.5], 'data_offsets': [0, 1]}}         | 1  | damaged",
        "{'a': {'dtype': 'I8', 'shape': ['1'], 'data_offsets': [0, 1]}}         | 1  | damaged",
        "{'a': {'dtype': 'I8', 'shape': [4294967296, 4294967296], 'data_offsets': [0, 0]}} | 0 | does not fit",
        "{'a': {'dtype': 'I8', 'shape': [4294967296, 4294967296], 'data_offsets': [1, 0]}} | 0 | does not fit",
        "{'a': {'dtype': 'I8', 'shape': [1], 'data_offsets': [99999999999999, 100000000000000]}} | 0 | describes",
        "{'a': 3}                                                               | 0  | no complete",
        "[]                                                                     | 0  | no complete",
        "{'a'                                                                   | 0  | no complete",
    })
    void whatIsNoSafetensorsFileIsRefused(String header, int dataBytes, String why) throws IOException {
        Path file = file("x.safetensors", header.replace('\'', '"'), dataBytes);
        IOException error = assertThrows(IOException.class, () -> SafetensorsFile.open(file));
        assertTrue(error.getMessage().contains(why), error.getMessage());
        assertTrue(error.getMessage().contains(file.toString()), error.getMessage());
    }

    @Test
    void aFileThatEndsWithinItsHeaderIsRefused() throws IOException {
        Path file = file("x.safetensors", "{" + A + "}", 24);
        byte[] bytes = Files.readAllBytes(file);
        for (int length : new int[] {0, 7, 8, 30}) {
            Files.write(file, java.util.Arrays.copyOf(bytes, length));
            assertThrows(IOException.class, () -> SafetensorsFile.open(file), length + " bytes");
        }
        assertThrows(NoSuchFileException.class, () -> SafetensorsFile.open(folder.resolve("missing")));
    }

    @Test
    void aDirectoryHasTheFilesOfItsIndexOrAllOfThem() throws IOException {
        assertThrows(NoSuchFileException.class, () -> SafetensorsFile.open(folder));
        String b = A.replace("\"a\"", "\"b\"");
        file("1.safetensors", "{" + A + "}", 24);
        file("2.safetensors", "{" + b + "}", 24);
        assertEquals(List.of("a", "b"), names(folder));
        Path index = folder.resolve("model.safetensors.index.json");
        Files.writeString(index, "{\"weight_map\": {\"b\": \"2.safetensors\"}}");
        assertEquals(List.of("b"), names(folder));
        Files.writeString(index, "{\"weight_map\": {\"b\": \"../2.safetensors\"}}");
        assertThrows(IOException.class, () -> names(folder));
        for (String damaged : List.of(
                "{}",
                "[]",
                "{\"weight_map\": {}}",
                "{\"weight_map\": []}",
                "{\"weight_map\": {\"b\": null}}",
                "{\"weight_map\": {\"b\": 2}}",
                "{\"weight_map\": {\"b\": \"\"}}",
                "{\"weight_map\": {\"b\": \"..\"}}",
                "{\"weight_map\": {\"b\": \"\\u0000\"}}")) {
            Files.writeString(index, damaged);
            IOException error = assertThrows(IOException.class, () -> names(folder), damaged);
            assertTrue(error.getMessage().contains(index.toString()), error.getMessage());
        }
        file("model.safetensors", "{" + A + "}", 24);
        assertEquals(List.of("a"), names(folder));
    }

    @Test
    void anEmptyTensorHasNoBytesHoweverLargeItsOtherLengthsAre() throws IOException {
        String header = A.replace("[2, 3]", "[4294967296, 4294967296, 0]").replace("24", "0");
        assertEquals(0, SafetensorsFile.open(file("x.safetensors", "{" + header + "}", 0)).get(0).numBytes());
    }

    @Test
    void aTensorInTwoFilesIsRefused() throws IOException {
        file("1.safetensors", "{" + A + "}", 24);
        file("2.safetensors", "{" + A + "}", 24);
        assertThrows(IOException.class, () -> names(folder));
    }
}
