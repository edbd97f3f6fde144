// One pass over a range of a run. Each tile is brought to float32 where it is stored otherwise, updated, and put back while it is in the
// first-level cache; tiles sit at global multiples of kTile, so quantisation blocks and random numbers do not depend on the split.

struct Piece {  // operands of one update, all at the same element
    char* p;
    char* m;
    char* v;
    const char* g;
    char* update;
    int64_t n;
};

template <class Rule, class Load>
struct Update {
    float* p;
    float* m;
    float* v;
    const char* g;
    float* update;
    Coefficients<float> k;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        typename T::F pi = T::load(p + i), mi = T::set(0), vi = T::set(0);
        if (Rule::kFirst) mi = T::load(m + i);
        if (Rule::kSecond) vi = T::load(v + i);
        const typename T::F u = Rule::template apply<T>(pi, mi, vi, Load::template load<T>(g, i) * T::set(k.c[0]), k.c);
        if (Rule::kWritesUpdate) T::store(update + i, u);
        else T::store(p + i, pi);
        if (Rule::kFirst) T::store(m + i, mi);
        if (Rule::kSecond) T::store(v + i, vi);
    }
};

template <class Rule, class Load>
static void update_piece(const Piece& x, const double* c) {
    for_lanes(Update<Rule, Load>{reinterpret_cast<float*>(x.p), reinterpret_cast<float*>(x.m), reinterpret_cast<float*>(x.v), x.g,
                                 reinterpret_cast<float*>(x.update), Coefficients<float>(c)}, x.n);
}

template <class Rule>
static void update_piece_f64(const Piece& x, const double* c) {
    double* p = reinterpret_cast<double*>(x.p);
    double* m = reinterpret_cast<double*>(x.m);
    double* v = reinterpret_cast<double*>(x.v);
    const double* g = reinterpret_cast<const double*>(x.g);
    for (int64_t i = 0; i < x.n; ++i) {
        double pi = p[i], mi = Rule::kFirst ? m[i] : 0, vi = Rule::kSecond ? v[i] : 0;
        const double u = Rule::template apply<Double>(pi, mi, vi, g[i] * c[0], c);
        if (Rule::kWritesUpdate) reinterpret_cast<double*>(x.update)[i] = u;
        else p[i] = pi;
        if (Rule::kFirst) m[i] = mi;
        if (Rule::kSecond) v[i] = vi;
    }
}

using UpdateFunction = void (*)(const Piece&, const double*);

template <class Rule>
static UpdateFunction by_gradient(Dtype dtype) {
    if (dtype == Dtype::f64) return update_piece_f64<Rule>;
    if (dtype == Dtype::bf16) return update_piece<Rule, LoadBf16>;
    if (dtype == Dtype::f16) return update_piece<Rule, LoadF16>;
    return update_piece<Rule, LoadF32>;
}

static UpdateFunction update_function(const Format& format, const Run& run) {
    switch (format.rule) {
        case Rule::adam: return by_gradient<Adam>(format.grad);
        case Rule::adagrad: return by_gradient<Adagrad>(format.grad);
        case Rule::lion: return by_gradient<Lion>(format.grad);
        case Rule::sgd: return run.state1 ? by_gradient<Sgd>(format.grad) : by_gradient<SgdPlain>(format.grad);
        case Rule::lamb: return by_gradient<Lamb>(format.grad);
    }
    return nullptr;
}

struct Tile {
    alignas(64) float p[kTile];
    alignas(64) float m[kTile];
    alignas(64) float v[kTile];
};

static char* open_parameter(const Format& f, const Run& run, int64_t b, int64_t n, Tile& tile) {
    if (f.param == Dtype::f32 || f.param == Dtype::f64) return run.param + b * item_size(f.param);
    if (run.param_low) for_lanes(JoinLow{reinterpret_cast<const uint16_t*>(run.param) + b, run.param_low + b, tile.p}, n);
    else widen(run.param + 2 * b, f.param, tile.p, n);
    return reinterpret_cast<char*>(tile.p);
}

static void close_parameter(const Format& f, const Run& run, int64_t b, int64_t n, Tile& tile, uint64_t key, uint32_t index) {
    if (f.param == Dtype::f32 || f.param == Dtype::f64) return;
    uint16_t* p = reinterpret_cast<uint16_t*>(run.param) + b;
    if (run.param_low) for_lanes(SplitLow{tile.p, p, run.param_low + b}, n);
    else for_lanes(NarrowStochastic{tile.p, p, key, index, 0}, n);
}

template <bool kSecond>
static char* open_state(const Format& f, char* state, float* scales, int64_t b, int64_t n, float* buffer) {
    if (!state || f.state == Dtype::f32 || f.state == Dtype::f64) return state ? state + b * item_size(f.state) : nullptr;
    if (f.state == Dtype::int8) decode_state<kSecond>(reinterpret_cast<uint8_t*>(state) + b, scales + b / kQuantBlock, buffer, n);
    else widen(state + 2 * b, f.state, buffer, n);
    return reinterpret_cast<char*>(buffer);
}

template <bool kSecond>
static void close_state(const Format& f, char* state, float* scales, int64_t b, int64_t n, float* buffer, uint64_t key, uint32_t index) {
    if (!state || f.state == Dtype::f32 || f.state == Dtype::f64) return;
    if (f.state == Dtype::int8)
        encode_state<kSecond>(buffer, reinterpret_cast<uint8_t*>(state) + b, scales + b / kQuantBlock, n, key, index);
    else if (kSecond) for_lanes(NarrowStochastic{buffer, reinterpret_cast<uint16_t*>(state) + b, key, index, 16}, n);
    else narrow(buffer, state + 2 * b, f.state, n, false);
}

static void write_copy(const Format& f, const Run& run, const char* p, int64_t b, int64_t n) {
    if (!run.copy_out) return;
    char* out = run.copy_out + b * item_size(f.copy);
    if (f.param == Dtype::f64) cast(p, Dtype::f64, out, f.copy, n, true);
    else if (f.copy == Dtype::f32) __builtin_memcpy(out, p, static_cast<size_t>(4 * n));
    else narrow(reinterpret_cast<const float*>(p), out, f.copy, n, true);
}

// The end of the tile (or of the range) that element `b` of the run is in.
static int64_t tile_end(const Run& run, int64_t b, int64_t end) {
    const int64_t next = b + kTile - static_cast<int64_t>((run.offset + static_cast<uint64_t>(b)) % kTile);
    return next < end ? next : end;
}

static void step(const Format& f, const Run& run, const Row* rows, int64_t begin, int64_t end, RowNorms* norms) {
    const UpdateFunction update = update_function(f, run);
    const int64_t grad_size = item_size(f.grad), wide = f.param == Dtype::f64 ? 8 : 4;
    Tile tile;
    int64_t row = 0;
    while (rows[row].end <= begin) ++row;
    for (int64_t b = begin, e; b < end; b = e) {
        e = tile_end(run, b, end);
        const int64_t n = e - b;
        const uint64_t index = run.offset + static_cast<uint64_t>(b);
        const uint64_t key = tile_key(f.key, index);
        char* p = open_parameter(f, run, b, n, tile);
        char* m = open_state<false>(f, run.state1, run.scale1, b, n, tile.m);
        char* v = open_state<true>(f, run.state2, run.scale2, b, n, tile.v);
        char* u = run.update ? run.update + b * wide : nullptr;
        for (int64_t i = b, j; i < e; i = j) {
            if (rows[row].end <= i) ++row;
            j = rows[row].end < e ? rows[row].end : e;
            const int64_t d = i - b;
            update({p + d * wide, m ? m + d * wide : nullptr, v ? v + d * wide : nullptr, run.grad + i * grad_size,
                    u ? u + d * wide : nullptr, j - i}, rows[row].c);
            if (norms) {
                const Dtype dtype = f.param == Dtype::f64 ? Dtype::f64 : Dtype::f32;
                norms[row].weight += sum_squares(p + d * wide, dtype, j - i);
                norms[row].update += sum_squares(u + d * wide, dtype, j - i);
            }
        }
        close_state<false>(f, run.state1, run.scale1, b, n, tile.m, key, static_cast<uint32_t>(index));
        close_state<true>(f, run.state2, run.scale2, b, n, tile.v, key, static_cast<uint32_t>(index));
        if (f.rule != Rule::lamb) {
            close_parameter(f, run, b, n, tile, key, static_cast<uint32_t>(index));
            write_copy(f, run, p, b, n);
        }
        if (f.zero_grad) __builtin_memset(run.grad + b * grad_size, 0, static_cast<size_t>(n * grad_size));
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
    const int64_t wide = f.param == Dtype::f64 ? 8 : 4;
    Tile tile;
    int64_t row = 0;
    while (rows[row].end <= begin) ++row;
    for (int64_t b = begin, e; b < end; b = e) {
        e = tile_end(run, b, end);
        const uint64_t index = run.offset + static_cast<uint64_t>(b);
        char* p = open_parameter(f, run, b, e - b, tile);
        for (int64_t i = b, j; i < e; i = j) {
            if (rows[row].end <= i) ++row;
            j = rows[row].end < e ? rows[row].end : e;
            subtract(f, p + (i - b) * wide, run.update + i * wide, rows[row].c[0], j - i);
        }
        close_parameter(f, run, b, e - b, tile, tile_key(f.key, index), static_cast<uint32_t>(index));
        write_copy(f, run, p, b, e - b);
    }
}
