// One pass over a range of a run. A tile's parameters are brought to float32 where they are stored otherwise, updated, and put back while
// they are in the first-level cache; tiles sit at global multiples of kTile, so quantisation blocks and random numbers do not depend on
// how a buffer is split into calls or chunks. Where the update loop does it all, a tile is as long as a chunk.

constexpr int64_t kEncodeAhead = 1024;  // prefetch distance in elements while an 8-bit block is encoded; a page of float32

static bool is_wide(Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::f64; }

static char* open_parameter(const Format& f, const Run& run, int64_t b, int64_t n, float* scratch) {
    if (is_wide(f.param)) return run.param + b * item_size(f.param);
    if (run.param_low) for_lanes(JoinLow{reinterpret_cast<const uint16_t*>(run.param) + b, run.param_low + b, scratch}, n);
    else widen(run.param + 2 * b, f.param, scratch, n);
    return reinterpret_cast<char*>(scratch);
}

static void close_parameter(const Format& f, const Run& run, const Results& to, int64_t b, int64_t n, const float* scratch) {
    if (is_wide(f.param)) return;
    const uint64_t index = run.offset + static_cast<uint64_t>(b);
    uint16_t* p = reinterpret_cast<uint16_t*>(to.param) + b;
    if (to.param_low) for_lanes(SplitLow{scratch, p, to.param_low + b}, n);
    else for_lanes(NarrowStochastic{scratch, p, tile_key(f.key, index, Stream::parameter), static_cast<uint32_t>(index)}, n);
}

static Results results_of(const Format& f, const Run& run) {
    if (f.apart) return run.to;
    return {run.param, run.param_low, {run.state[0], run.state[1]}, {run.scale[0], run.scale[1]}};
}

// Whether the update loop itself writes the copy.
static bool copies_in_loop(const Format& f) {
    return f.rule != Rule::lamb && f.param == Dtype::f32 && (f.copy == Dtype::bf16 || f.copy == Dtype::f16);
}

// Whether a tile is visited again after its update.
static bool has_phases(const Format& f) {
    return f.rule == Rule::lamb || !is_wide(f.param) || f.zero_grad || (f.copy != Dtype::none && !copies_in_loop(f));
}

static void write_copy(const Format& f, const Run& run, const char* p, int64_t b, int64_t n) {
    if (!run.copy_out) return;
    char* out = run.copy_out + b * item_size(f.copy);
    if (f.param == Dtype::f64) cast(p, Dtype::f64, out, f.copy, n, true);
    else if (f.copy == Dtype::f32) __builtin_memcpy(out, p, static_cast<size_t>(4 * n));
    else narrow(reinterpret_cast<const float*>(p), out, f.copy, n, true);
}

// The end of the stretch of `length` elements in global coordinates that element `b` of the run is in, or `end`.
static int64_t stretch_end(const Run& run, int64_t b, int64_t end, int64_t length) {
    const int64_t next = b + length - static_cast<int64_t>((run.offset + static_cast<uint64_t>(b)) % static_cast<uint64_t>(length));
    return next < end ? next : end;
}

// Walks the rows of one range, in order.
class Stepper {
public:
    Stepper(const Format& f, const Run& run, const Row* rows, const Ahead& ahead, RowNorms* norms)
        : length(has_phases(f) ? kTile : kChunk), f_(f), run_(run), to_(results_of(f, run)), row_(rows), ahead_(ahead), norms_(norms),
          update_(update_function(f, run)), stretch_(f.state == Dtype::int8 ? kQuantBlock : length) {}

    const int64_t length;  // of a tile

    void tile(int64_t begin, int64_t end) {
        char* p = open_parameter(f_, run_, begin, end - begin, parameters_);
        char* to = is_wide(f_.param) ? to_.param + begin * item_size(f_.param) : p;
        const uint64_t key = tile_key(f_.key, run_.offset + static_cast<uint64_t>(begin), Stream::second_moment);
        for (int64_t b = begin, e; b < end; b = e) {
            e = stretch_end(run_, b, end, stretch_);
            Magnitudes largest = {{0, 0}};
            for (int64_t i = b, j; i < e; i = j) {
                for (; row_->end <= i; ++row_) norms_ += norms_ != nullptr;
                j = row_->end < e ? row_->end : e;
                piece(p + (i - begin) * item_size(wide()), to + (i - begin) * item_size(wide()), b, i, j, key, largest);
            }
            if (f_.state != Dtype::int8) continue;
            encode_waiting();
            waiting_ = {b, e, key, largest, side_};
            side_ ^= 1;
        }
        encode_waiting();
        if (f_.rule != Rule::lamb) {
            close_parameter(f_, run_, to_, begin, end - begin, parameters_);
            if (!copies_in_loop(f_)) write_copy(f_, run_, to, begin, end - begin);
        }
        const int64_t grad_size = item_size(f_.grad);
        if (f_.zero_grad) __builtin_memset(run_.grad + begin * grad_size, 0, static_cast<size_t>((end - begin) * grad_size));
    }

private:
    Dtype wide() const { return f_.param == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

    // Elements [i, j) of the stretch that begins at b.
    void piece(char* p, char* to, int64_t b, int64_t i, int64_t j, uint64_t key, Magnitudes& largest) {
        const uint32_t index = static_cast<uint32_t>(run_.offset + static_cast<uint64_t>(i));
        Piece x{p, to, run_.grad + i * item_size(f_.grad), {}, {}, {}, {}, nullptr, nullptr, f_.copy == Dtype::f16, key, index, j - i, &ahead_, i};
        for (int s = 0; s < 2; ++s) {
            if (run_.state[s]) x.state[s] = run_.state[s] + i * item_size(f_.state);
            if (run_.state[s]) x.state_to[s] = to_.state[s] + i * item_size(f_.state);
            x.wide[s] = state_[side_][s] + (i - b);
            if (run_.scale[s]) x.scale[s] = run_.scale[s][b / kQuantBlock];
        }
        if (run_.update) x.update = run_.update + i * item_size(wide());
        if (run_.copy_out && copies_in_loop(f_)) x.copy = run_.copy_out + i * item_size(f_.copy);
        const Magnitudes found = update_(x, *row_);
        for (int s = 0; s < 2; ++s) largest.of[s] = found.of[s] > largest.of[s] ? found.of[s] : largest.of[s];
        if (!norms_) return;
        norms_->weight += sum_squares(x.p, wide(), x.n);
        norms_->update += sum_squares(x.update, wide(), x.n);
    }

    // A block whose new 8-bit states are in state_[side]. It is encoded after the next one's update, so that no instruction waits for its
    // largest magnitudes.
    struct Block {
        int64_t begin, end;
        uint64_t key;
        Magnitudes largest;
        int side;
    };

    void encode_waiting() {
        const Block x = waiting_;
        if (x.begin == x.end) return;
        waiting_.begin = x.end;
        const uint32_t index = static_cast<uint32_t>(run_.offset + static_cast<uint64_t>(x.begin));
        const int64_t n = x.end - x.begin, k = x.begin / kQuantBlock;
        uint8_t* first = reinterpret_cast<uint8_t*>(to_.state[0]);
        uint8_t* second = reinterpret_cast<uint8_t*>(to_.state[1]);
        const int64_t next = x.begin + kEncodeAhead < run_.n ? x.begin + kEncodeAhead : x.begin;
        const char* parameters = run_.param + next * item_size(f_.param);
        const char* gradients = run_.grad + next * item_size(f_.grad);
        if (first) encode_block<false>(state_[x.side][0], first + x.begin, to_.scale[0] + k, n, x.largest.of[0], x.key, index, parameters);
        if (second) encode_block<true>(state_[x.side][1], second + x.begin, to_.scale[1] + k, n, x.largest.of[1], x.key, index, gradients);
    }

    const Format& f_;
    const Run& run_;
    const Results to_;
    const Row* row_;
    const Ahead& ahead_;
    RowNorms* norms_;
    const UpdateFunction update_;
    const int64_t stretch_;
    alignas(64) float parameters_[kTile];
    Block waiting_{};
    int side_ = 0;  // of the block that is updated
    alignas(64) float state_[2][2][kQuantBlock];
};

static void step(const Format& f, const Run& run, const Row* rows, int64_t begin, int64_t end, const Ahead& ahead, RowNorms* norms) {
    Stepper stepper(f, run, rows, ahead, norms);
    for (int64_t b = begin, e; b < end; b = e) {
        e = stretch_end(run, b, end, stepper.length);
        stepper.tile(b, e);
    }
}

struct Subtract {
    float* p;
    const float* update;
    float factor;
    template <class T>
    ZOK_MEMBER void at(int64_t i) { T::store(p + i, T::load(p + i) - T::set(factor) * T::load(update + i)); }
};

static void subtract(const Format& f, char* p, const char* update, double factor, int64_t n) {
    if (f.param != Dtype::f64) {
        for_lanes(Subtract{reinterpret_cast<float*>(p), reinterpret_cast<const float*>(update), static_cast<float>(factor)}, n);
        return;
    }
    double* to = reinterpret_cast<double*>(p);
    const double* from = reinterpret_cast<const double*>(update);
    for (int64_t i = 0; i < n; ++i) to[i] -= factor * from[i];
}

static void apply(const Format& f, const Run& run, const Row* rows, int64_t begin, int64_t end) {
    alignas(64) float scratch[kTile];
    const int64_t wide = f.param == Dtype::f64 ? 8 : 4;
    for (int64_t b = begin, e; b < end; b = e) {
        e = stretch_end(run, b, end, kTile);
        char* p = open_parameter(f, run, b, e - b, scratch);
        for (int64_t i = b, j; i < e; i = j) {
            while (rows->end <= i) ++rows;
            j = rows->end < e ? rows->end : e;
            subtract(f, p + (i - b) * wide, run.update + i * wide, rows->c[0], j - i);
        }
        close_parameter(f, run, results_of(f, run), b, e - b, scratch);
        write_copy(f, run, p, b, e - b);
    }
}
