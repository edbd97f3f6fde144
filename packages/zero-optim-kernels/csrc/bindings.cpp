// Python's side: operands become addresses, every argument is checked, then the GIL is released. The only file that knows Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.hpp"
#include "drive.hpp"
#include "nogil.hpp"
#include "operands.hpp"
#include "processors.hpp"

namespace zok {
namespace {

uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// What one optimizer call is about, as Python's `steps.py` hands it over.
struct Call {
    int rule;
    py::object n, param, param_low, grad, state1, state2, scale1, scale2, copy_out, update;
    std::string param_dtype, grad_dtype, state_dtype;
    py::object copy_dtype;
    py::list rows;
    bool zero_grad;
    uint64_t element_offset, seed, step;
    int threads;
    py::object out;  // None, or operands like param, param_low, state1, state2, scale1 and scale2, each None where that is
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

std::vector<Row> parse_rows(const py::list& rows, bool list, size_t runs, int64_t n) {
    std::vector<Row> result;
    int64_t previous = 0;
    for (py::handle item : rows) {
        const py::tuple row = py::reinterpret_borrow<py::tuple>(item);
        Row parsed{list ? kMostElements * 2 : row[0].cast<int64_t>(), {}, {}};
        if (!list && (parsed.end < previous || parsed.end > n))
            throw py::value_error("segments: ends must not decrease and must not exceed n = " + std::to_string(n) + ", got " +
                                  std::to_string(parsed.end) + " after " + std::to_string(previous));
        previous = parsed.end;
        const py::tuple values = row[1].cast<py::tuple>();
        for (size_t i = 0; i < values.size() && i < kCoefficients; ++i) parsed.f[i] = static_cast<float>(parsed.c[i] = values[i].cast<double>());
        result.push_back(parsed);
    }
    if (list && result.size() != 1 && result.size() != runs)
        throw py::value_error("segments: a list of tensors takes one row or one per tensor (" + std::to_string(runs) + "), got " +
                              std::to_string(result.size()));
    if (!list && (result.empty() || result.back().end != n))
        throw py::value_error("segments: the last end must be n = " + std::to_string(n) + ", got " + std::to_string(previous));
    return result;
}

void check_present(const Call& call, const Format& f, bool apply) {
    const bool lamb = f.rule == Rule::lamb, first = f.rule == Rule::adam || f.rule == Rule::lion || lamb;
    const bool second = f.rule != Rule::lion && f.rule != Rule::sgd;
    const std::pair<const char*, bool> missing[] = {{"param", call.param.is_none()},
                                                    {"grad", !apply && call.grad.is_none()},
                                                    {"the first state", !apply && first && call.state1.is_none()},
                                                    {"the second state", !apply && second && call.state2.is_none()},
                                                    {"update", lamb && call.update.is_none()}};
    for (const auto& [name, absent] : missing)
        if (absent) throw py::type_error(std::string(name) + ": expected an address or buffer, got None");
    if (f.state != Dtype::int8) return;
    if ((!call.state1.is_none() && call.scale1.is_none()) || (!call.state2.is_none() && call.scale2.is_none()))
        throw py::value_error("state_dtype 'int8' needs a float32 scale per block of 256 for every state");
    if (call.element_offset % kQuantBlock != 0)
        throw py::value_error("element_offset: 8-bit state is in blocks of 256; expected a multiple of 256, got " + std::to_string(call.element_offset));
}

// A list's tensors are laid out one after the other from `element_offset`, each at a multiple of the quantisation block.
void parse_runs(const Call& call, Operands& operands, const Format& f, const std::vector<int64_t>& sizes, bool list, size_t rows,
                std::vector<Run>& runs) {
    std::vector<int64_t> blocks;
    runs.clear();
    uint64_t offset = call.element_offset;
    for (size_t i = 0; i < sizes.size(); ++i) {
        blocks.push_back((sizes[i] + kQuantBlock - 1) / kQuantBlock);
        Run run{};
        run.n = sizes[i];
        run.offset = offset;
        run.row = list && rows > 1 ? static_cast<int64_t>(i) : 0;
        runs.push_back(run);
        offset += static_cast<uint64_t>(blocks[i] * kQuantBlock);
    }
    const Dtype wide = f.param == Dtype::f64 ? Dtype::f64 : Dtype::f32;
    const auto narrow = [](char* data) { return reinterpret_cast<uint16_t*>(data); };
    const auto single = [](char* data) { return reinterpret_cast<float*>(data); };
    const bool written = !f.apart;
    operands.each(call.param, "param", f.param, sizes, list, written, [&](size_t i, char* p) { runs[i].param = p; });
    operands.each(call.param_low, "param_low", Dtype::bf16, sizes, list, written, [&](size_t i, char* p) { runs[i].param_low = narrow(p); });
    operands.each(call.grad, "grad", f.grad, sizes, list, f.zero_grad, [&](size_t i, char* p) { runs[i].grad = p; });
    operands.each(call.state1, "the first state", f.state, sizes, list, written, [&](size_t i, char* p) { runs[i].state[0] = p; });
    operands.each(call.state2, "the second state", f.state, sizes, list, written, [&](size_t i, char* p) { runs[i].state[1] = p; });
    operands.each(call.scale1, "the first state's scale", Dtype::f32, blocks, list, written, [&](size_t i, char* p) { runs[i].scale[0] = single(p); });
    operands.each(call.scale2, "the second state's scale", Dtype::f32, blocks, list, written, [&](size_t i, char* p) { runs[i].scale[1] = single(p); });
    operands.each(call.copy_out, "copy_out", f.copy, sizes, list, true, [&](size_t i, char* p) { runs[i].copy_out = p; });
    operands.each(call.update, "update", wide, sizes, list, true, [&](size_t i, char* p) { runs[i].update = p; });
    if (!f.apart) return;
    const py::tuple out = call.out;
    operands.each(out[0], "out: param", f.param, sizes, list, true, [&](size_t i, char* p) { runs[i].to.param = p; });
    operands.each(out[1], "out: param_low", Dtype::bf16, sizes, list, true, [&](size_t i, char* p) { runs[i].to.param_low = narrow(p); });
    operands.each(out[2], "out: the first state", f.state, sizes, list, true, [&](size_t i, char* p) { runs[i].to.state[0] = p; });
    operands.each(out[3], "out: the second state", f.state, sizes, list, true, [&](size_t i, char* p) { runs[i].to.state[1] = p; });
    operands.each(out[4], "out: the first state's scale", Dtype::f32, blocks, list, true, [&](size_t i, char* p) { runs[i].to.scale[0] = single(p); });
    operands.each(out[5], "out: the second state's scale", Dtype::f32, blocks, list, true, [&](size_t i, char* p) { runs[i].to.scale[1] = single(p); });
}

Format parse_format(const Call& call) {
    Format f{};
    f.rule = static_cast<Rule>(call.rule);
    f.param = parse_dtype(call.param_dtype, "param_dtype");
    f.grad = parse_dtype(call.grad_dtype, "grad_dtype");
    f.state = parse_dtype(call.state_dtype, "state_dtype");
    f.copy = call.copy_dtype.is_none() ? Dtype::none : parse_dtype(call.copy_dtype.cast<std::string>(), "copy_dtype");
    f.zero_grad = call.zero_grad;
    f.apart = !call.out.is_none();
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
    check_threads(call.threads);
    const std::vector<Row> rows = parse_rows(call.rows, list, sizes.size(), sizes.empty() ? 0 : sizes[0]);
    check_present(call, format, apply);
    // Kept between calls: for thousands of tensors it is large enough that the allocator would return it to the system each time.
    static thread_local std::vector<Run> runs;
    parse_runs(call, operands, format, sizes, list, rows.size(), runs);
    active();  // a ZERO_ISA that cannot run is an error before anything is written
    const bool with_norms = format.rule == Rule::lamb && !apply;
    std::vector<RowNorms> norms;
    {
        const WithoutGil nogil;
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
    check_threads(threads);
    active();
    const WithoutGil nogil;
    return run_norm_squared(spans, dtype, threads);
}

void norms_squared(py::object x, py::object out, py::object n, int64_t block, const std::string& dtype_name, int threads) {
    Operands operands;
    const int64_t count = parse_count(n);
    const Dtype dtype = parse_dtype(dtype_name, "dtype");
    if (block < 1 || block > kNormChunk) throw py::value_error("block must be from 1 to " + std::to_string(kNormChunk) + ", got " + std::to_string(block));
    const char* source = required(operands, x, "x", dtype, count, false);
    char* target = required(operands, out, "out", Dtype::f64, (count + block - 1) / block, true);
    check_threads(threads);
    active();
    const WithoutGil nogil;
    run_norms_squared(source, dtype, count, block, reinterpret_cast<double*>(target), threads);
}

void digests(py::object x, py::object out, py::object n, int64_t block, int threads) {
    Operands operands;
    const int64_t bytes = parse_count(n);
    if (block < 1) throw py::value_error("block must be 1 or more, got " + std::to_string(block));
    const char* source = operands.address(x, "x", Dtype::int8, bytes, false);
    if (source == nullptr && bytes > 0) throw py::type_error("x: expected an address or buffer, got None");
    char* target = required(operands, out, "out", Dtype::f64, (bytes + block - 1) / block, true);
    check_threads(threads);
    active();
    const WithoutGil nogil;
    run_digests(source, bytes, block, reinterpret_cast<uint64_t*>(target), threads);
}

int64_t count_nonfinite(py::object x, py::object n, const std::string& dtype_name, int threads) {
    Operands operands;
    const Dtype dtype = parse_dtype(dtype_name, "dtype");
    const std::vector<Span> spans = parse_spans(operands, x, n, dtype, false);
    check_threads(threads);
    active();
    const WithoutGil nogil;
    return run_count_nonfinite(spans, dtype, threads);
}

void scale(py::object x, py::object n, double factor, const std::string& dtype_name, int threads) {
    Operands operands;
    const Dtype dtype = parse_dtype(dtype_name, "dtype");
    const std::vector<Span> spans = parse_spans(operands, x, n, dtype, true);
    check_threads(threads);
    active();
    const WithoutGil nogil;
    run_scale(spans, dtype, factor, threads);
}

void cast(py::object x, py::object out, py::object n, const std::string& from_name, const std::string& to_name, int threads) {
    Operands operands;
    const int64_t count = parse_count(n);
    const Dtype from = parse_dtype(from_name, "dtype"), to = parse_dtype(to_name, "out_dtype");
    const char* source = required(operands, x, "x", from, count, false);
    char* target = required(operands, out, "out", to, count, true);
    check_threads(threads);
    active();
    const WithoutGil nogil;
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
    check_threads(threads);
    active();
    const WithoutGil nogil;
    run_sum_slices(inputs, dtype, target, out_dtype, count, divisor, threads);
}

BlockFormat parse_block_format(const std::string& code, int64_t block, const std::string& dtype_name) {
    BlockFormat f{};
    if (code == "int8") f.code = Code::int8;
    else if (code == "int4") f.code = Code::int4;
    else if (code == "e4m3") f.code = Code::e4m3;
    else if (code == "u5e3") f.code = Code::u5e3;
    else throw py::value_error("code: expected one of 'int8', 'int4', 'e4m3', 'u5e3', got '" + code + "'");
    f.dtype = parse_dtype(dtype_name, "dtype");
    if (f.dtype != Dtype::f32 && f.dtype != Dtype::bf16 && f.dtype != Dtype::f16)
        throw py::value_error("dtype: expected 'f32', 'bf16' or 'f16', got '" + dtype_name + "'");
    if (block < 2 || block % 2 != 0 || block > kMostElements)
        throw py::value_error("block: expected an even number of elements >= 2, got " + std::to_string(block));
    f.block = block;
    return f;
}

int64_t payload_size(const BlockFormat& f, int64_t n) { return f.code == Code::int4 ? (n + 1) / 2 : n; }

void quantize(py::object x, py::object payload, py::object scales, py::object n, const std::string& code, int64_t block,
              const std::string& dtype_name, bool stochastic, uint64_t seed, uint64_t step_number, uint64_t element_offset, int threads) {
    Operands operands;
    const int64_t count = parse_count(n);
    BlockFormat f = parse_block_format(code, block, dtype_name);
    f.stochastic = stochastic;
    f.key = mix(mix(seed + 0x9e3779b97f4a7c15u) + step_number);
    f.offset = element_offset;
    const char* source = required(operands, x, "x", f.dtype, count, false);
    char* codes = operands.address(payload, "payload", Dtype::int8, payload_size(f, count), true);
    char* factors = required(operands, scales, "scales", Dtype::f32, (count + block - 1) / block, true);
    if (codes == nullptr && count > 0) throw py::type_error("payload: expected an address or buffer, got None");
    check_threads(threads);
    active();
    const WithoutGil nogil;
    run_quantize(f, source, reinterpret_cast<uint8_t*>(codes), reinterpret_cast<float*>(factors), count, threads);
}

void dequantize(py::object payload, py::object scales, py::object out, py::object n, const std::string& code, int64_t block,
                const std::string& dtype_name, int threads) {
    Operands operands;
    const int64_t count = parse_count(n);
    const BlockFormat f = parse_block_format(code, block, dtype_name);
    char* codes = operands.address(payload, "payload", Dtype::int8, payload_size(f, count), false);
    char* factors = required(operands, scales, "scales", Dtype::f32, (count + block - 1) / block, false);
    char* target = required(operands, out, "out", f.dtype, count, true);
    if (codes == nullptr && count > 0) throw py::type_error("payload: expected an address or buffer, got None");
    check_threads(threads);
    active();
    const WithoutGil nogil;
    run_dequantize(f, reinterpret_cast<uint8_t*>(codes), reinterpret_cast<float*>(factors), target, count, threads);
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
             uint64_t element_offset, uint64_t seed, uint64_t step_number, int threads, py::object out) {
              return step({rule, n, param, param_low, grad, state1, state2, scale1, scale2, copy_out, update, param_dtype, grad_dtype,
                           state_dtype, copy_dtype, rows, zero_grad, element_offset, seed, step_number, threads, out}, apply);
          });
    m.def("norm_squared", &norm_squared);
    m.def("norms_squared", &norms_squared);
    m.def("digests", &digests);
    m.def("count_nonfinite", &count_nonfinite);
    m.def("scale", &zok::scale);
    m.def("cast", &zok::cast);
    m.def("sum_slices", &zok::sum_slices);
    m.def("quantize", &quantize);
    m.def("dequantize", &dequantize);
}
