// Converts and checks addresses, buffers, counts and dtypes from Python. Included by bindings.cpp alone.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "drive.hpp"

namespace py = pybind11;

namespace zok {
namespace {

constexpr int64_t kMostElements = int64_t{1} << 56;

Dtype parse_dtype(const std::string& name, const char* argument) {
    if (name == "f32") return Dtype::f32;
    if (name == "bf16") return Dtype::bf16;
    if (name == "f16") return Dtype::f16;
    if (name == "f64") return Dtype::f64;
    if (name == "int8") return Dtype::int8;
    throw py::value_error(std::string(argument) + ": expected one of 'f32', 'bf16', 'f16', 'f64', 'int8', got '" + name + "'");
}

// Whether a buffer's item format can hold `dtype`; any format of raw bytes can.
bool format_fits(const char* format, Dtype dtype) {
    if (format == nullptr) return true;
    if (*format == '@' || *format == '<' || *format == '=') ++format;
    const std::string code(format);
    if (code == "B" || code == "b" || code == "c") return true;  // raw bytes; the length decides
    switch (dtype) {
        case Dtype::f32: return code == "f";
        case Dtype::f64: return code == "d";
        case Dtype::bf16: return code == "H" || code == "h";
        case Dtype::f16: return code == "H" || code == "h" || code == "e";
        default: return false;
    }
}

// Operands of one call. Keeps their buffers exported as long as it lives, so that the memory neither moves nor is freed.
class Operands {
public:
    Operands() = default;
    Operands(const Operands&) = delete;
    ~Operands() {
        for (const std::unique_ptr<Py_buffer>& view : views_) PyBuffer_Release(view.get());
    }

    // Returns the address of `object`, an address or a buffer of `n` items of `dtype`; null for None. `name` is for errors.
    char* address(py::handle object, const char* name, Dtype dtype, int64_t n, bool writable) {
        if (object.is_none()) return nullptr;
        if (PyLong_Check(object.ptr())) return integer(object, name, dtype, n);
        auto view = std::make_unique<Py_buffer>();
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object.ptr(), view.get(), flags) != 0) {
            PyErr_Clear();
            throw py::type_error(std::string(name) + ": expected an integer address or a C-contiguous" + (writable ? " writable" : "") +
                                 " buffer, got " + std::string(py::str(py::type::handle_of(object).attr("__name__"))) +
                                 "; a torch tensor passes its data_ptr()");
        }
        views_.push_back(std::move(view));
        const Py_buffer& held = *views_.back();
        if (!format_fits(held.format, dtype))
            throw py::type_error(std::string(name) + ": the buffer's item format '" + held.format + "' is not that of the stated dtype");
        if (held.len != n * item_size(dtype))
            throw py::value_error(std::string(name) + ": expected " + std::to_string(n * item_size(dtype)) + " bytes (" + std::to_string(n) +
                                  " elements), got " + std::to_string(held.len));
        return aligned(static_cast<char*>(held.buf), name, dtype);
    }

    // Calls sink(i, address of tensor i) for every tensor of a list, or for a single operand with i = 0; not at all for None.
    template <class Sink>
    void each(py::handle object, const char* name, Dtype dtype, const std::vector<int64_t>& sizes, bool list, bool writable, Sink sink) {
        if (object.is_none()) return;
        if (!list) return sink(0, address(object, name, dtype, sizes[0], writable));
        if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr()))
            throw py::type_error(std::string(name) + ": expected a list with one operand per tensor, as n is a list");
        if (static_cast<size_t>(PySequence_Fast_GET_SIZE(object.ptr())) != sizes.size())
            throw py::value_error(std::string(name) + ": expected " + std::to_string(sizes.size()) + " operands, as many as n has, got " +
                                  std::to_string(PySequence_Fast_GET_SIZE(object.ptr())));
        PyObject** items = PySequence_Fast_ITEMS(object.ptr());
        for (size_t i = 0; i < sizes.size(); ++i) {
            if (items[i] == Py_None) throw py::type_error(std::string(name) + "[" + std::to_string(i) + "]: expected an address or buffer, got None");
            sink(i, address(items[i], name, dtype, sizes[i], writable));
        }
    }

private:
    static char* aligned(char* data, const char* name, Dtype dtype) {
        if ((reinterpret_cast<uintptr_t>(data) & static_cast<uintptr_t>(item_size(dtype) - 1)) != 0)
            throw py::value_error(std::string(name) + ": the address is not a multiple of the item size " + std::to_string(item_size(dtype)));
        return data;
    }

    static char* integer(py::handle object, const char* name, Dtype dtype, int64_t n) {
        static_assert(sizeof(unsigned long) == 8, "an address fits the integer whose conversion from Python is the quickest");
        const unsigned long value = PyLong_AsUnsignedLong(object.ptr());
        if (value == static_cast<unsigned long>(-1) && PyErr_Occurred()) {
            PyErr_Clear();
            throw py::value_error(std::string(name) + ": the address does not fit 64 unsigned bits");
        }
        if (value == 0 && n > 0) throw py::value_error(std::string(name) + ": address 0 cannot hold " + std::to_string(n) + " elements");
        return aligned(reinterpret_cast<char*>(static_cast<uintptr_t>(value)), name, dtype);
    }

    std::vector<std::unique_ptr<Py_buffer>> views_;
};

int64_t parse_count(py::handle n) {
    if (!PyLong_Check(n.ptr())) throw py::type_error("n: expected an int or a list of ints");
    const long long value = PyLong_AsLongLong(n.ptr());
    if (value < 0 || value > kMostElements) {
        PyErr_Clear();
        throw py::value_error("n: expected a number of elements from 0 to 2**56, got " + std::string(py::str(n)));
    }
    return value;
}

// Returns the numbers of elements; `list` receives whether `n` is a list or tuple.
std::vector<int64_t> parse_sizes(py::handle n, bool& list) {
    list = PyList_Check(n.ptr()) || PyTuple_Check(n.ptr());
    if (!list) return {parse_count(n)};
    std::vector<int64_t> sizes;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(n.ptr());
    sizes.reserve(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) sizes.push_back(parse_count(PySequence_Fast_GET_ITEM(n.ptr(), i)));
    return sizes;
}

std::vector<Span> parse_spans(Operands& operands, py::handle x, py::handle n, Dtype dtype, bool writable) {
    bool list;
    const std::vector<int64_t> sizes = parse_sizes(n, list);
    if (dtype == Dtype::int8) throw py::value_error("dtype: 'int8' holds optimizer state and no numbers; expected a floating dtype");
    if (x.is_none()) throw py::type_error("x: expected an address or buffer, got None");
    std::vector<Span> spans;
    operands.each(x, "x", dtype, sizes, list, writable, [&](size_t i, char* data) { spans.push_back({data, sizes[i]}); });
    return spans;
}

// As Operands::address, but None is an error.
char* required(Operands& operands, py::handle object, const char* name, Dtype dtype, int64_t n, bool writable) {
    if (object.is_none()) throw py::type_error(std::string(name) + ": expected an address or buffer, got None");
    if (dtype == Dtype::int8) throw py::value_error(std::string(name) + ": 'int8' holds codes and no numbers; expected a floating dtype");
    return operands.address(object, name, dtype, n, writable);
}

int check_threads(int threads) {
    if (threads < 0) throw py::value_error("threads: expected 0 (all) or a positive number, got " + std::to_string(threads));
    return threads;
}

}  // namespace
}  // namespace zok
