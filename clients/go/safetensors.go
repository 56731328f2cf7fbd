package penstock

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"penstock/clients/go/penstockv1"
)

const (
	singleFile     = "model.safetensors"
	indexFile      = "model.safetensors.index.json"
	maxHeaderBytes = 100_000_000
)

// Tensor is one tensor of a weight update.
type Tensor struct {
	// Name is the name that the checkpoint has for it.
	Name  string
	DType penstockv1.DataType
	// Shape is as in the checkpoint; empty for a scalar.
	Shape []uint64
	// Data has the values from offset 0 on, little-endian and row-major. It is read twice: for the checksum, and when
	// it is sent.
	Data io.ReaderAt
}

var elementBits = map[penstockv1.DataType]uint64{
	penstockv1.DataType_DATA_TYPE_BF16:    16,
	penstockv1.DataType_DATA_TYPE_F16:     16,
	penstockv1.DataType_DATA_TYPE_F32:     32,
	penstockv1.DataType_DATA_TYPE_F8_E4M3: 8,
	penstockv1.DataType_DATA_TYPE_F8_E5M2: 8,
	penstockv1.DataType_DATA_TYPE_I8:      8,
	penstockv1.DataType_DATA_TYPE_I4:      4,
}

// fileTypes has the contract's data type for the names that safetensors files use.
var fileTypes = map[string]penstockv1.DataType{
	"BF16":    penstockv1.DataType_DATA_TYPE_BF16,
	"F16":     penstockv1.DataType_DATA_TYPE_F16,
	"F32":     penstockv1.DataType_DATA_TYPE_F32,
	"F8_E4M3": penstockv1.DataType_DATA_TYPE_F8_E4M3,
	"F8_E5M2": penstockv1.DataType_DATA_TYPE_F8_E5M2,
	"I8":      penstockv1.DataType_DATA_TYPE_I8,
}

// numBytes is the size of the tensor's values; two int4 values share a byte.
func (t Tensor) numBytes() (uint64, error) {
	total, ok := elementBits[t.DType]
	if !ok {
		return 0, fmt.Errorf("the tensor %s has the data type %s, which has no size", t.Name, t.DType)
	}
	// An empty tensor has no bytes, however large its other dimensions are.
	if slices.Contains(t.Shape, 0) {
		return 0, nil
	}
	for _, length := range t.Shape {
		high, low := bits.Mul64(total, length)
		if high != 0 || low > 1<<62 {
			return 0, fmt.Errorf("the tensor %s has the shape %v, which no file can hold", t.Name, t.Shape)
		}
		total = low
	}
	return (total + 7) / 8, nil
}

// Safetensors are the tensors of one or more open files.
type Safetensors struct {
	// Tensors are in the order of the files, and in each file in the order of their bytes.
	Tensors []Tensor
	files   []*os.File
}

// OpenSafetensors opens a safetensors file, or those of a folder: model.safetensors, else the files that
// model.safetensors.index.json names, else all *.safetensors in it. It reads headers only.
//
// It returns an error for what cannot be read, for what is no complete safetensors file, and for data types that cannot
// be sent, in which case the error names every such tensor.
func OpenSafetensors(path string) (*Safetensors, error) {
	paths, err := tensorFiles(path)
	if err != nil {
		return nil, err
	}
	found := &Safetensors{}
	names := map[string]string{}
	var failures []error
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			failures = append(failures, err)
			break
		}
		found.files = append(found.files, file)
		tensors, err := tensorsOf(file)
		if err != nil {
			failures = append(failures, err)
		}
		for _, tensor := range tensors {
			if other, ok := names[tensor.Name]; ok {
				failures = append(failures, fmt.Errorf("the tensor %s is in %s and in %s", tensor.Name, other, path))
			}
			names[tensor.Name] = path
		}
		found.Tensors = append(found.Tensors, tensors...)
	}
	if len(failures) > 0 {
		return nil, errors.Join(append(failures, found.Close())...)
	}
	return found, nil
}

// Close closes the files, after which the tensors cannot be read.
func (s *Safetensors) Close() error {
	var failures []error
	for _, file := range s.files {
		failures = append(failures, file.Close())
	}
	return errors.Join(failures...)
}

func tensorFiles(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil || !info.IsDir() {
		return []string{path}, err
	}
	if single := filepath.Join(path, singleFile); isFile(single) {
		return []string{single}, nil
	}
	index := filepath.Join(path, indexFile)
	if isFile(index) {
		return indexed(index)
	}
	found, err := filepath.Glob(filepath.Join(escaped(path), "*.safetensors"))
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("%s holds no *.safetensors files", path)
	}
	return found, err
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// escaped keeps what is special in a pattern from being special in the name of a folder.
func escaped(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

func indexed(index string) ([]string, error) {
	data, err := os.ReadFile(index)
	if err != nil {
		return nil, err
	}
	var content struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(data, &content); err != nil {
		return nil, fmt.Errorf("%s is no index of safetensors files: %w", index, err)
	}
	var found []string
	for _, name := range content.WeightMap {
		if name == "" || filepath.Base(name) != name || name == ".." {
			return nil, fmt.Errorf("%s names the file %q, which is not in its folder", index, name)
		}
		found = append(found, filepath.Join(filepath.Dir(index), name))
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%s names no files", index)
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// tensorsOf reads the header: 8 bytes of little-endian length, then a JSON object
// {name: {dtype, shape, data_offsets}}; the data follows.
func tensorsOf(file *os.File) ([]Tensor, error) {
	incomplete := func(format string, parts ...any) error {
		return fmt.Errorf("%s is no complete safetensors file: "+format, append([]any{file.Name()}, parts...)...)
	}
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	var length [8]byte
	if _, err := file.ReadAt(length[:], 0); err != nil {
		return nil, incomplete("it has %d bytes", info.Size())
	}
	size := binary.LittleEndian.Uint64(length[:])
	if size == 0 || size > maxHeaderBytes || int64(size)+8 > info.Size() {
		return nil, incomplete("its header would have %d bytes, and the file has %d", size, info.Size())
	}
	header := make([]byte, size)
	if _, err := file.ReadAt(header, 8); err != nil {
		return nil, err
	}
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(header, &entries); err != nil {
		return nil, incomplete("its header is not JSON: %w", err)
	}
	if entries == nil {
		return nil, incomplete("its header is null")
	}
	delete(entries, "__metadata__")
	start := int64(size) + 8
	places := make([]place, 0, len(entries))
	var failures []error
	end := int64(0)
	for name, raw := range entries {
		found, err := placeOf(name, raw)
		if err != nil {
			failures = append(failures, incomplete("%w", err))
			continue
		}
		places, end = append(places, found), max(end, found.end)
		if found.tensor.DType == penstockv1.DataType_DATA_TYPE_UNSPECIFIED {
			failures = append(failures, fmt.Errorf("the tensor %s of %s has the data type %s, which cannot be sent; "+
				"convert it to BF16, F16, F32, F8_E4M3, F8_E5M2 or I8", name, file.Name(), found.spelled))
		}
	}
	if len(failures) == 0 && start+end != info.Size() {
		failures = append(failures, incomplete("its header describes %d bytes, and the file has %d", start+end, info.Size()))
	}
	if len(failures) > 0 {
		slices.SortFunc(failures, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
		return nil, errors.Join(failures...)
	}
	slices.SortFunc(places, func(a, b place) int {
		if a.begin != b.begin {
			return int(min(max(a.begin-b.begin, -1), 1))
		}
		return strings.Compare(a.tensor.Name, b.tensor.Name)
	})
	tensors := make([]Tensor, len(places))
	for i, at := range places {
		tensors[i] = at.tensor
		tensors[i].Data = io.NewSectionReader(file, start+at.begin, at.end-at.begin)
	}
	return tensors, nil
}

// place says where in a file the bytes of a tensor are, counted from the end of the header.
type place struct {
	tensor     Tensor
	spelled    string // the data type as the file has it
	begin, end int64
}

func placeOf(name string, raw json.RawMessage) (place, error) {
	var entry struct {
		DType   string    `json:"dtype"`
		Shape   *[]uint64 `json:"shape"`
		Offsets []int64   `json:"data_offsets"`
	}
	if err := json.Unmarshal(raw, &entry); err != nil {
		return place{}, fmt.Errorf("the entry of %s is damaged: %w", name, err)
	}
	if entry.Shape == nil || len(entry.Offsets) != 2 || entry.Offsets[0] < 0 || entry.Offsets[1] < entry.Offsets[0] {
		return place{}, fmt.Errorf("the entry of %s is damaged: it needs a shape and two data_offsets", name)
	}
	found := place{
		tensor:  Tensor{Name: name, DType: fileTypes[entry.DType], Shape: *entry.Shape},
		spelled: entry.DType,
		begin:   entry.Offsets[0],
		end:     entry.Offsets[1],
	}
	if found.tensor.DType == penstockv1.DataType_DATA_TYPE_UNSPECIFIED {
		return found, nil
	}
	size, err := found.tensor.numBytes()
	if err == nil && size != uint64(found.end-found.begin) {
		err = fmt.Errorf("the shape %v of %s does not fit its %d bytes", found.tensor.Shape, name, found.end-found.begin)
	}
	return found, err
}
