// The loop of each rule over one piece, for each dtype of gradient and state.

// The largest magnitudes of an 8-bit piece's two states, as bits.
struct Magnitudes {
    uint32_t of[2];
};
using UpdateFunction = Magnitudes (*)(const Piece&, const Row&);

// The copy of the new parameters in 16 bits.
struct Copy {
    uint16_t* out;  // or null
    bool half, stream;
    template <class T>
    ZOK_MEMBER void store(int64_t i, typename T::F x) const {
        const typename T::H h = half ? T::to_f16(x) : T::narrow(bf16_nearest<T>(x));
        if (stream) T::stream_h(out + i, h);
        else T::store_h(out + i, h);
    }
};

template <class Rule, class Load, class First, class Second>
struct Update {
    const float* p;
    Destination<float> to;  // of new parameters, or of LAMB's update direction
    const char* g;
    Copy copy;
    First first;
    Second second;
    Coefficients k;
    Ahead ahead;  // its `from` counts from the piece's beginning
    // All loads come first: each stream is asked for several lines at once, and no load waits behind a store.
    template <class T, int kCount>
    ZOK_MEMBER void at(int64_t i) {
        typename T::F p_[kCount], m[kCount], v[kCount], g_[kCount], u[kCount];
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) g_[j] = Load::template load<T>(g, i + j * T::W);
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) p_[j] = T::load(p + i + j * T::W);
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) m[j] = first.template load<T>(i + j * T::W);
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) v[j] = second.template load<T>(i + j * T::W);
        if constexpr (kCount * T::W == kLine) {
            if (i >= ahead.from) ask_next(i - ahead.from);
            else ask_here(i + kAhead);
        }
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) u[j] = Rule::template apply<T>(p_[j], m[j], v[j], g_[j] * T::set(k.c[0]), k.c);
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) to.template store<T>(i + j * T::W, Rule::kWritesUpdate ? u[j] : p_[j]);
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) first.template store<T>(i + j * T::W, m[j]);
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) second.template store<T>(i + j * T::W, v[j]);
        if (Rule::kWritesUpdate || copy.out == nullptr) return;
        ZOK_UNROLL for (int j = 0; j < kCount; ++j) copy.template store<T>(i + j * T::W, p_[j]);
    }
    static constexpr int kLine = 16;  // elements of a line of the cache in float32, and of a pass of the loop
    ZOK_MEMBER void ask_here(int64_t i) const {
        if constexpr (First::kAskedByEncoder || Second::kAskedByEncoder) return;
        __builtin_prefetch(p + i);
        __builtin_prefetch(g + i * Load::kItem);
        first.ask(i);
        second.ask(i);
    }
    ZOK_MEMBER void ask_next(int64_t i) const {
        asm("" : "+r"(i));  // or the update loop would step an address for each of these, and spill its own
        __builtin_prefetch(ahead.stream[0] + i * static_cast<int64_t>(sizeof(float)));
        __builtin_prefetch(ahead.stream[1] + i * Load::kItem);
        if constexpr (First::kItem > 0) __builtin_prefetch(ahead.stream[2] + i * First::kItem);
        if constexpr (Second::kItem > 0) __builtin_prefetch(ahead.stream[3] + i * Second::kItem);
    }
};

template <bool kSecond>
ZOK_INLINE uint32_t largest_of(const State8<kSecond>& state) { return state.largest.bits(); }
template <class State>
ZOK_INLINE uint32_t largest_of(const State&) { return 0; }

template <class Rule, class Load, template <bool> class State>
static Magnitudes update_piece(const Piece& x, const Row& row) {
    using First = std::conditional_t<Rule::kFirst, State<false>, NoState<false>>;
    using Second = std::conditional_t<Rule::kSecond, State<true>, NoState<true>>;
    using Body = Update<Rule, Load, First, Second>;
    Coefficients k;
    __builtin_memcpy(k.c, row.f, sizeof(k.c));
    const bool stream = reinterpret_cast<uintptr_t>(x.copy) % sizeof(Vector::H) == 0;
    const Copy copy = {reinterpret_cast<uint16_t*>(x.copy), x.half, stream};
    Ahead ahead = *x.ahead;
    ahead.from -= x.begin;
    const Destination<float> to = Rule::kWritesUpdate ? Destination<float>(x.update, x.update) : Destination<float>(x.p, x.to);
    const Body body{reinterpret_cast<const float*>(x.p), to, x.g, copy, First(x), Second(x), k, ahead};
    const Body done = for_groups<Vector::kGroup>(body, x.n);
    return {{largest_of(done.first), largest_of(done.second)}};
}

template <class Rule>
static Magnitudes update_piece_f64(const Piece& x, const Row& row) {
    const double* p = reinterpret_cast<const double*>(x.p);
    const double* m = reinterpret_cast<const double*>(x.state[0]);
    const double* v = reinterpret_cast<const double*>(x.state[1]);
    double* const to[3] = {reinterpret_cast<double*>(x.to), reinterpret_cast<double*>(x.state_to[0]), reinterpret_cast<double*>(x.state_to[1])};
    const double* g = reinterpret_cast<const double*>(x.g);
    for (int64_t i = 0; i < x.n; ++i) {
        double p_i = p[i], m_i = Rule::kFirst ? m[i] : 0, v_i = Rule::kSecond ? v[i] : 0;
        const double u = Rule::template apply<Double>(p_i, m_i, v_i, g[i] * row.c[0], row.c);
        if (Rule::kWritesUpdate) reinterpret_cast<double*>(x.update)[i] = u;
        else to[0][i] = p_i;
        if (Rule::kFirst) to[1][i] = m_i;
        if (Rule::kSecond) to[2][i] = v_i;
    }
    return {{0, 0}};
}

template <class Rule, class Load>
static UpdateFunction by_state(Dtype state) {
    if (state == Dtype::int8) return update_piece<Rule, Load, State8>;
    if (state == Dtype::bf16) return update_piece<Rule, Load, State16>;
    return update_piece<Rule, Load, State32>;
}

template <class Rule>
static UpdateFunction by_gradient(const Format& f) {
    if (f.grad == Dtype::f64) return update_piece_f64<Rule>;
    if (f.grad == Dtype::bf16) return by_state<Rule, LoadBf16>(f.state);
    if (f.grad == Dtype::f16) return by_state<Rule, LoadF16>(f.state);
    return by_state<Rule, LoadF32>(f.state);
}

static UpdateFunction update_function(const Format& f, const Run& run) {
    switch (f.rule) {
        case Rule::adam: return by_gradient<Adam>(f);
        case Rule::adagrad: return by_gradient<Adagrad>(f);
        case Rule::lion: return by_gradient<Lion>(f);
        case Rule::sgd: return run.state[0] ? by_gradient<Sgd>(f) : by_gradient<SgdPlain>(f);
        case Rule::lamb: return by_gradient<Lamb>(f);
    }
    return nullptr;
}
