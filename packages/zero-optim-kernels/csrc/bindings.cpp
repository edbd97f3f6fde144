// Python's side: operands become addresses, every argument is checked, then the GIL is released. The only file that knows Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.hpp"
#include "drive.hpp"
#include "pool.hpp"

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

// Buffers stay exported, so their memory cannot move or go, as long as this lives.
class Operands {
public:
    Operands() = default;
    Operands(const Operands&) = delete;
    ~Operands() {
        for (const std::unique_ptr<Py_buffer>& view : views_) PyBuffer_Release(view.get());
    }

    // The address of `n` items; null for None.
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

    // One address per size, from a list or from a single operand. Empty for None.
    std::vector<char*> addresses(py::handle object, const char* name, Dtype dtype, const std::vector<int64_t>& sizes, bool list, bool writable) {
        std::vector<char*> result;
        if (object.is_none()) return result;
        result.reserve(sizes.size());
        if (!list) {
            result.push_back(address(object, name, dtype, sizes[0], writable));
            return result;
        }
        if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr()))
            throw py::type_error(std::string(name) + ": expected a list with one operand per tensor, as n is a list");
        if (static_cast<size_t>(PySequence_Fast_GET_SIZE(object.ptr())) != sizes.size())
            throw py::value_error(std::string(name) + ": expected " + std::to_string(sizes.size()) + " operands, as many as n has, got " +
                                  std::to_string(PySequence_Fast_GET_SIZE(object.ptr())));
        PyObject** items = PySequence_Fast_ITEMS(object.ptr());
        for (size_t i = 0; i < sizes.size(); ++i) {
            if (items[i] == Py_None) throw py::type_error(std::string(name) + "[" + std::to_string(i) + "]: expected an address or buffer, got None");
            result.push_back(address(items[i], name, dtype, sizes[i], writable));
        }
        return result;
    }

private:
    static char* aligned(char* data, const char* name, Dtype dtype) {
        if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(item_size(dtype)) != 0)
            throw py::value_error(std::string(name) + ": the address is not a multiple of the item size " + std::to_string(item_size(dtype)));
        return data;
    }

    static char* integer(py::handle object, const char* name, Dtype dtype, int64_t n) {
        const unsigned long long value = PyLong_AsUnsignedLongLong(object.ptr());
        if (PyErr_Occurred()) {
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
    if (value < 0 || value > kMostElements || PyErr_Occurred()) {
        PyErr_Clear();
        throw py::value_error("n: expected a number of elements from 0 to 2**56, got " + std::string(py::str(n)));
    }
    return value;
}

std::vector<int64_t> parse_sizes(py::handle n, bool& list) {
    list = PyList_Check(n.ptr()) || PyTuple_Check(n.ptr());
    if (!list) return {parse_count(n)};
    std::vector<int64_t> sizes;
    for (py::handle item : n) sizes.push_back(parse_count(item));
    return sizes;
}

std::vector<Span> parse_spans(Operands& operands, py::handle x, py::handle n, Dtype dtype, bool writable) {
    bool list;
    const std::vector<int64_t> sizes = parse_sizes(n, list);
    if (dtype == Dtype::int8) throw py::value_error("dtype: 'int8' holds optimizer state and no numbers; expected a floating dtype");
    if (x.is_none()) throw py::type_error("x: expected an address or buffer, got None");
    const std::vector<char*> data = operands.addresses(x, "x", dtype, sizes, list, writable);
    std::vector<Span> spans;
    for (size_t i = 0; i < data.size(); ++i) spans.push_back({data[i], sizes[i]});
    return spans;
}

uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// What one optimizer call is about, as Python's `_call.py` hands it over.
struct Call {
    int rule;
    py::object n, param, param_low, grad, state1, state2, scale1, scale2, copy_out, update;
    std::string param_dtype, grad_dtype, state_dtype;
    py::object copy_dtype;
    py::list rows;
    bool zero_grad;
    uint64_t element_offset, seed, step;
    int threads;
};

void check_formats(const Format& f, bool has_low) {
    if (f.param == Dtype::f64) {
        if (f.grad != Dtype::f64 || f.state != Dtype::f64)
            throw py::value_error("param_dtype 'f64' needs grad_dtype and state_dtype 'f64'");
    } else if (f.param != Dtype::f32 && f.param != Dtype::bf16) {
        throw py::value_error("param_dtype: expected 'f32', 'bf16' or 'f64'; update a float32 master and write an f16 copy_out instead");
    }
    if (f.param != Dtype::f64 && (f.grad == Dtype::f64 || f.grad == Dtype::int8))
        throw py::value_error("grad_dtype: expected 'f32', 'bf16' or 'f16' for this param_dtype");
    if (f.param != Dtype::f64 && (f.state == Dtype::f64 || f.state == Dtype::f16))
        throw py::value_error("state_dtype: expected 'f32', 'bf16' or 'int8' for this param_dtype");
    if (has_low && f.param != Dtype::bf16) throw py::value_error("param_low completes a parameter of dtype 'bf16'");
    if (f.copy == Dtype::int8 || f.copy == Dtype::f64) throw py::value_error("copy_dtype: expected 'f32', 'bf16' or 'f16'");
}

std::vector<Row> parse_rows(const py::list& rows, bool list, int64_t n) {
    std::vector<Row> result;
    int64_t previous = 0;
    for (py::handle item : rows) {
        const py::tuple row = py::reinterpret_borrow<py::tuple>(item);
        Row parsed{list ? kMostElements * 2 : row[0].cast<int64_t>(), {}};
        if (!list && (parsed.end < previous || parsed.end > n))
            throw py::value_error("segments: ends must not decrease and must not exceed n = " + std::to_string(n) + ", got " +
                                  std::to_string(parsed.end) + " after " + std::to_string(previous));
        previous = parsed.end;
        const py::tuple values = row[1].cast<py::tuple>();
        for (size_t i = 0; i < values.size() && i < kCoefficients; ++i) parsed.c[i] = values[i].cast<double>();
        result.push_back(parsed);
    }
    if (list && result.size() != 1) throw py::value_error("segments: a list of tensors takes one set of hyperparameters");
    if (!list && (result.empty() || result.back().end != n))
        throw py::value_error("segments: the last end must be n = " + std::to_string(n) + ", got " + std::to_string(previous));
    return result;
}

// A list's tensors are laid out one after the other from `element_offset`, each at a multiple of the quantisation block.
std::vector<Run> parse_runs(const Call& call, Operands& operands, const Format& f, const std::vector<int64_t>& sizes, bool list) {
    std::vector<int64_t> blocks;
    for (int64_t n : sizes) blocks.push_back((n + kQuantBlock - 1) / kQuantBlock);
    const bool lamb = f.rule == Rule::lamb, wide = f.param == Dtype::f64;
    const auto param = operands.addresses(call.param, "param", f.param, sizes, list, true);
    const auto low = operands.addresses(call.param_low, "param_low", Dtype::bf16, sizes, list, true);
    const auto grad = operands.addresses(call.grad, "grad", f.grad, sizes, list, f.zero_grad);
    const auto state1 = operands.addresses(call.state1, "state1", f.state, sizes, list, true);
    const auto state2 = operands.addresses(call.state2, "state2", f.state, sizes, list, true);
    const auto scale1 = operands.addresses(call.scale1, "scale of the first state", Dtype::f32, blocks, list, true);
    const auto scale2 = operands.addresses(call.scale2, "scale of the second state", Dtype::f32, blocks, list, true);
    const auto copy = operands.addresses(call.copy_out, "copy_out", f.copy, sizes, list, true);
    const auto update = operands.addresses(call.update, "update", wide ? Dtype::f64 : Dtype::f32, sizes, list, true);
    if (f.state == Dtype::int8 && ((!state1.empty() && scale1.empty()) || (!state2.empty() && scale2.empty())))
        throw py::value_error("state_dtype 'int8' needs a float32 scale per block of 256 for every state");
    if (f.state == Dtype::int8 && call.element_offset % kQuantBlock != 0)
        throw py::value_error("element_offset: 8-bit state is in blocks of 256; expected a multiple of 256, got " + std::to_string(call.element_offset));
    if (lamb && update.empty()) throw py::type_error("update: expected an address or buffer, got None");
    std::vector<Run> runs;
    uint64_t offset = call.element_offset;
    auto at = [](const std::vector<char*>& list_of, size_t i) { return list_of.empty() ? nullptr : list_of[i]; };
    for (size_t i = 0; i < sizes.size(); ++i) {
        runs.push_back({at(param, i), reinterpret_cast<uint16_t*>(at(low, i)), at(grad, i), at(state1, i), at(state2, i),
                        reinterpret_cast<float*>(at(scale1, i)), reinterpret_cast<float*>(at(scale2, i)), at(copy, i), at(update, i),
                        sizes[i], offset});
        offset += static_cast<uint64_t>(blocks[i] * kQuantBlock);
    }
    return runs;
}

Format parse_format(const Call& call) {
    Format f{};
    f.rule = static_cast<Rule>(call.rule);
    f.param = parse_dtype(call.param_dtype, "param_dtype");
    f.grad = parse_dtype(call.grad_dtype, "grad_dtype");
    f.state = parse_dtype(call.state_dtype, "state_dtype");
    f.copy = call.copy_dtype.is_none() ? Dtype::none : parse_dtype(call.copy_dtype.cast<std::string>(), "copy_dtype");
    f.zero_grad = call.zero_grad;
    f.key = mix(mix(call.seed + 0x9e3779b97f4a7c15u) + call.step);
    check_formats(f, !call.param_low.is_none());
    if (call.copy_out.is_none() != call.copy_dtype.is_none()) throw py::value_error("copy_out and copy_dtype go together; one of them is None");
    return f;
}

py::object step(const Call& call, bool apply) {
    Operands operands;
    bool list;
    const std::vector<int64_t> sizes = parse_sizes(call.n, list);
    const Format format = parse_format(call);
    if (call.threads < 0) throw py::value_error("threads: expected 0 (all) or a positive number, got " + std::to_string(call.threads));
    const std::vector<Row> rows = parse_rows(call.rows, list, sizes.empty() ? 0 : sizes[0]);
    const std::vector<Run> runs = parse_runs(call, operands, format, sizes, list);
    active();  // a ZERO_ISA that cannot run is an error before anything is written
    const bool with_norms = format.rule == Rule::lamb && !apply;
    std::vector<RowNorms> norms;
    {
        py::gil_scoped_release nogil;
        if (apply) run_apply(format, runs, rows, call.threads);
        else run_step(format, runs, rows, call.threads, with_norms ? &norms : nullptr);
    }
    py::list result;
    for (const RowNorms& row : norms) result.append(py::make_tuple(row.weight, row.update));
    return with_norms ? py::object(result) : py::none();
}

double norm_squared(py::object x, py::object n, const std::string& dtype_name, int threads) {
    Operands operands;
    const Dtype dtype = parse_dtype(dtype_name, "dtype");
    const std::vector<Span> spans = parse_spans(operands, x, n, dtype, false);
    active();
    py::gil_scoped_release nogil;
    return run_norm_squared(spans, dtype, threads);
}

int64_t count_nonfinite(py::object x, py::object n, const std::string& dtype_name, int threads) {
    Operands operands;
    const Dtype dtype = parse_dtype(dtype_name, "dtype");
    const std::vector<Span> spans = parse_spans(operands, x, n, dtype, false);
    active();
    py::gil_scoped_release nogil;
    return run_count_nonfinite(spans, dtype, threads);
}

void scale(py::object x, py::object n, double factor, const std::string& dtype_name, int threads) {
    Operands operands;
    const Dtype dtype = parse_dtype(dtype_name, "dtype");
    const std::vector<Span> spans = parse_spans(operands, x, n, dtype, true);
    active();
    py::gil_scoped_release nogil;
    run_scale(spans, dtype, factor, threads);
}

char* required(Operands& operands, py::handle object, const char* name, Dtype dtype, int64_t n, bool writable) {
    if (object.is_none()) throw py::type_error(std::string(name) + ": expected an address or buffer, got None");
    if (dtype == Dtype::int8) throw py::value_error(std::string(name) + ": 'int8' holds optimizer state and no numbers; expected a floating dtype");
    return operands.address(object, name, dtype, n, writable);
}

void cast(py::object x, py::object out, py::object n, const std::string& from_name, const std::string& to_name, int threads) {
    Operands operands;
    const int64_t count = parse_count(n);
    const Dtype from = parse_dtype(from_name, "dtype"), to = parse_dtype(to_name, "out_dtype");
    const char* source = required(operands, x, "x", from, count, false);
    char* target = required(operands, out, "out", to, count, true);
    active();
    py::gil_scoped_release nogil;
    run_cast(source, from, target, to, count, threads);
}

void sum_slices(py::object slices, py::object out, py::object n, const std::string& dtype_name, const std::string& out_name, double divisor,
                int threads) {
    Operands operands;
    const int64_t count = parse_count(n);
    const Dtype dtype = parse_dtype(dtype_name, "dtype"), out_dtype = parse_dtype(out_name, "out_dtype");
    if ((!PyList_Check(slices.ptr()) && !PyTuple_Check(slices.ptr())) || py::len(slices) == 0)
        throw py::type_error("slices: expected a list of at least one address or buffer");
    if (divisor == 0) throw py::value_error("divisor: expected a number other than 0");
    std::vector<const char*> inputs;
    for (py::handle slice : slices) inputs.push_back(required(operands, slice, "slices", dtype, count, false));
    char* target = required(operands, out, "out", out_dtype, count, true);
    active();
    py::gil_scoped_release nogil;
    run_sum_slices(inputs, dtype, target, out_dtype, count, divisor, threads);
}

std::vector<std::pair<std::string, std::string>> target_names() {
    std::vector<std::pair<std::string, std::string>> result;
    for (const Target& target : targets()) result.emplace_back(target.kernels->name, target.unavailable);
    return result;
}

}  // namespace
}  // namespace zok

PYBIND11_MODULE(_native, m, py::mod_gil_not_used()) {
    using namespace zok;
    m.def("active_isa", [] { return std::string(active().name); });
    m.def("targets", &target_names);
    m.def("default_threads", &default_threads);
    m.def("step",
          [](int rule, bool apply, py::object n, py::object param, py::object param_low, py::object grad, py::object state1, py::object state2,
             py::object scale1, py::object scale2, py::object copy_out, py::object update, const std::string& param_dtype,
             const std::string& grad_dtype, const std::string& state_dtype, py::object copy_dtype, py::list rows, bool zero_grad,
             uint64_t element_offset, uint64_t seed, uint64_t step_number, int threads) {
              return step({rule, n, param, param_low, grad, state1, state2, scale1, scale2, copy_out, update, param_dtype, grad_dtype,
                           state_dtype, copy_dtype, rows, zero_grad, element_offset, seed, step_number, threads}, apply);
          });
    m.def("norm_squared", &norm_squared);
    m.def("count_nonfinite", &count_nonfinite);
    m.def("scale", &zok::scale);
    m.def("cast", &zok::cast);
    m.def("sum_slices", &zok::sum_slices);
}
