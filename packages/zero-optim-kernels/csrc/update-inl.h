// The loop of each rule over one piece, for each dtype of gradient and state.

// The largest magnitudes of an 8-bit piece's two states, as bits.
struct Magnitudes {
    uint32_t of[2];
};
using UpdateFunction = Magnitudes (*)(const Piece&, const Row&);

template <class Rule, class Load, class First, class Second>
struct Update {
    float* p;
    const char* g;
    float* update;
    First first;
    Second second;
    Coefficients k;
    template <class T>
    ZOK_MEMBER void at(int64_t i) {
        typename T::F p_i = T::load(p + i), m = first.template load<T>(i), v = second.template load<T>(i);
        const typename T::F u = Rule::template apply<T>(p_i, m, v, Load::template load<T>(g, i) * T::set(k.c[0]), k.c);
        if constexpr (Rule::kWritesUpdate) T::store(update + i, u);
        else T::store(p + i, p_i);
        first.template store<T>(i, m);
        second.template store<T>(i, v);
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
    const Body done = for_lanes(Body{reinterpret_cast<float*>(x.p), x.g, reinterpret_cast<float*>(x.update), First(x), Second(x), k}, x.n);
    return {{largest_of(done.first), largest_of(done.second)}};
}

template <class Rule>
static Magnitudes update_piece_f64(const Piece& x, const Row& row) {
    double* p = reinterpret_cast<double*>(x.p);
    double* m = reinterpret_cast<double*>(x.state[0]);
    double* v = reinterpret_cast<double*>(x.state[1]);
    const double* g = reinterpret_cast<const double*>(x.g);
    for (int64_t i = 0; i < x.n; ++i) {
        double p_i = p[i], m_i = Rule::kFirst ? m[i] : 0, v_i = Rule::kSecond ? v[i] : 0;
        const double u = Rule::template apply<Double>(p_i, m_i, v_i, g[i] * row.c[0], row.c);
        if (Rule::kWritesUpdate) reinterpret_cast<double*>(x.update)[i] = u;
        else p[i] = p_i;
        if (Rule::kFirst) m[i] = m_i;
        if (Rule::kSecond) v[i] = v_i;
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
