// The two layouts of a DLPack capsule, as far as a reader needs them.
#pragma once

#include <cstdint>

namespace zaio::dlpack {

struct Device {
    int32_t type, id;
};

struct DataType {
    uint8_t code, bits;
    uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    const int64_t* shape;
    const int64_t* strides;  // elements; null means C order
    uint64_t byte_offset;
};

struct Versioned {
    uint32_t major, minor;
    void* manager_context;
    void (*deleter)(Versioned*);
    uint64_t flags;
    Tensor tensor;
};

constexpr uint64_t kReadOnly = 1;

inline bool c_contiguous(const Tensor& tensor) {
    if (tensor.strides == nullptr) return true;
    int64_t expected = 1;
    for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
        if (tensor.shape[i] == 0) return true;
        if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
        expected *= tensor.shape[i];
    }
    return true;
}

inline uint64_t nbytes(const Tensor& tensor) {
    uint64_t elements = 1;
    for (int32_t i = 0; i < tensor.ndim; ++i) elements *= static_cast<uint64_t>(tensor.shape[i]);
    return elements * ((uint64_t{tensor.dtype.bits} * tensor.dtype.lanes + 7) / 8);
}

}  // namespace zaio::dlpack
