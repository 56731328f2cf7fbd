package penstock_test

import (
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	penstock "penstock/clients/go"
	"penstock/clients/go/penstockv1"
)

// written makes a safetensors file by hand: 8 bytes of little-endian length, the header, the data.
func written(t *testing.T, path, header, data string) string {
	t.Helper()
	var length [8]byte
	binary.LittleEndian.PutUint64(length[:], uint64(len(header)))
	if err := os.WriteFile(path, []byte(string(length[:])+header+data), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTensorsOfAFile(t *testing.T) {
	path := written(t, filepath.Join(t.TempDir(), "a.safetensors"), `{"__metadata__": {"format": "pt"},
		"second": {"dtype": "I8", "shape": [], "data_offsets": [6, 7]},
		"empty": {"dtype": "F32", "shape": [0, 5], "data_offsets": [6, 6]},
		"first": {"dtype": "BF16", "shape": [1, 3], "data_offsets": [0, 6]}}`, "abcdefg")
	found := must[*penstock.Safetensors](t)(penstock.OpenSafetensors(path))
	defer func() { _ = found.Close() }()
	var told []string
	for _, tensor := range found.Tensors {
		data := make([]byte, 16)
		n, err := tensor.Data.ReadAt(data, 0)
		if err != nil && err != io.EOF {
			t.Fatal(err)
		}
		told = append(told, tensor.Name+" "+tensor.DType.String()+" "+string(data[:n]))
	}
	want := "first DATA_TYPE_BF16 abcdef, empty DATA_TYPE_F32 , second DATA_TYPE_I8 g"
	if got := strings.Join(told, ", "); got != want {
		t.Errorf("%s\nis not\n%s", got, want)
	}
	if shape := found.Tensors[0].Shape; len(shape) != 2 || shape[0] != 1 || shape[1] != 3 {
		t.Error(shape)
	}
}

func TestFilesOfAFolder(t *testing.T) {
	one := func(name string) string {
		return `{"` + name + `": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}`
	}
	names := func(folder string) string {
		found, err := penstock.OpenSafetensors(folder)
		if err != nil {
			return err.Error()
		}
		defer func() { _ = found.Close() }()
		var told []string
		for _, tensor := range found.Tensors {
			told = append(told, tensor.Name)
		}
		return strings.Join(told, " ")
	}
	folder := filepath.Join(t.TempDir(), "[odd] *name")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	if got := names(folder); !strings.Contains(got, "holds no *.safetensors files") {
		t.Error(got)
	}
	written(t, filepath.Join(folder, "b.safetensors"), one("b"), "x")
	written(t, filepath.Join(folder, "a.safetensors"), one("a"), "x")
	if got := names(folder); got != "a b" {
		t.Errorf("all files: %s", got)
	}
	index := filepath.Join(folder, "model.safetensors.index.json")
	for content, want := range map[string]string{
		`{"weight_map": {"b": "b.safetensors"}}`:          "b",
		`{"weight_map": {"b": "../b.safetensors"}}`:       "not in its folder",
		`{"weight_map": {}}`:                              "names no files",
		`[]`:                                              "no index of safetensors files",
		`{"weight_map": {"c": "gone.safetensors"}}`:       "no such file",
		`{"weight_map": {"b": "b.safetensors", "c": ""}}`: "not in its folder",
	} {
		if err := os.WriteFile(index, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := names(folder); !strings.Contains(got, want) {
			t.Errorf("%s: %s", content, got)
		}
	}
	written(t, filepath.Join(folder, "model.safetensors"), one("single"), "x")
	if got := names(folder); got != "single" {
		t.Errorf("one file before an index: %s", got)
	}
	twice := t.TempDir()
	written(t, filepath.Join(twice, "1.safetensors"), one("a"), "x")
	written(t, filepath.Join(twice, "2.safetensors"), one("a"), "x")
	if got := names(twice); !strings.Contains(got, "the tensor a is in ") {
		t.Error(got)
	}
}

func TestDamagedFilesAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.safetensors")
	for name, test := range map[string]struct{ header, data, says string }{
		"no JSON":            {`{`, "", "its header is not JSON"},
		"null":               {`null`, "", "its header is null"},
		"no header":          {``, "", "its header would have 0 bytes"},
		"too short":          {`{"a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}}`, "xx", "describes 71 bytes, and the file has 70"},
		"too long":           {`{"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}`, "xx", "describes 69 bytes, and the file has 70"},
		"another shape":      {`{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}`, "xxxx", "[2] of a does not fit its 4 bytes"},
		"no shape":           {`{"a": {"dtype": "F32", "data_offsets": [0, 4]}}`, "xxxx", "the entry of a is damaged"},
		"a negative length":  {`{"a": {"dtype": "I8", "shape": [-1], "data_offsets": [0, 1]}}`, "x", "the entry of a is damaged"},
		"a negative place":   {`{"a": {"dtype": "I8", "shape": [1], "data_offsets": [-1, 0]}}`, "", "the entry of a is damaged"},
		"one place":          {`{"a": {"dtype": "I8", "shape": [1], "data_offsets": [0]}}`, "x", "the entry of a is damaged"},
		"larger than memory": {`{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}`, "", "no file can hold"},
		"types that cannot be sent": {
			`{"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "b": {"dtype": "BOOL", "shape": [1], "data_offsets": [8, 9]}}`,
			"123456789", "I64, which cannot be sent",
		},
	} {
		t.Run(name, func(t *testing.T) {
			found, err := penstock.OpenSafetensors(written(t, path, test.header, test.data))
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, %v", found, err)
			}
			if strings.Contains(test.header, "BOOL") && !strings.Contains(err.Error(), "the tensor b") {
				t.Errorf("it does not name every tensor: %v", err)
			}
		})
	}
	if err := os.WriteFile(path, []byte("xyz"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := penstock.OpenSafetensors(path); err == nil || !strings.Contains(err.Error(), "it has 3 bytes") {
		t.Error(err)
	}
}

func TestAnEmptyTensorIsSentWithoutChunks(t *testing.T) {
	// The model has no such tensor, and says so: the manifest was taken.
	empty := penstock.Tensor{Name: "none", DType: penstockv1.DataType_DATA_TYPE_F32, Shape: []uint64{0}}
	_, err := dial(t, demo.addr).UpdateWeightsFromTensors(
		limited(t), &penstockv1.UpdateWeightsBegin{VersionLabel: "x", Partial: true}, []penstock.Tensor{empty})
	if failed, ok := err.(*penstock.Error); !ok || failed.Reason != penstock.ErrInvalidTensors {
		t.Error(err)
	}
}
