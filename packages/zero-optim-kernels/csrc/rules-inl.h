// The arithmetic of each optimizer on one vector (or one float64). Multiplications and additions are separate instructions on every
// target, so all instruction sets give the same bits; a memory-bound step does not gain from fusing them.
//
// Coefficients are prepared in float64 by Python (`_rules.py`); slot 0 multiplies the gradient before `apply`.

struct Double {  // float64 parameters with float64 state
    using F = double;
    using E = double;
    ZOK_INLINE F load(const double* p) { return *p; }
    ZOK_INLINE void store(double* p, F x) { *p = x; }
    ZOK_INLINE F set(double x) { return x; }
    ZOK_INLINE F sqrt(F x) { return __builtin_sqrt(x); }
};

struct Coefficients {
    float c[kCoefficients];
};

// sign(x), keeping zeros and NaN.
template <class T>
struct Sign {
    ZOK_INLINE typename T::F of(typename T::F x) {
        const typename T::U u = T::bits(x);
        return T::from_bits(T::pick(T::differs_from_zero(x), (u & T::setu(0x80000000u)) | T::setu(0x3f800000u), u));
    }
};
template <>
struct Sign<Double> {
    ZOK_INLINE double of(double x) { return x > 0 ? 1.0 : x < 0 ? -1.0 : x; }
};

// a + w (b - a), computed from the nearer end so that w = 1 gives b; `rest` is 1 - w.
template <class T>
ZOK_INLINE typename T::F lerp(typename T::F a, typename T::F b, typename T::E w, typename T::E rest) {
    if (w < static_cast<typename T::E>(0.5)) return a + T::set(w) * (b - a);
    return b - (b - a) * T::set(rest);
}

// Adam and AdamW, Kingma & Ba (arXiv 1412.6980, algorithm 1), Loshchilov & Hutter (arXiv 1711.05101, algorithm 2).
struct Adam {
    static constexpr bool kFirst = true, kSecond = true, kWritesUpdate = false;
    enum { scale, decay, l2, w1, rest1, b2, w2, negative_step, inverse_root_correction, eps };
    template <class T>
    ZOK_INLINE typename T::F direction(typename T::F p, typename T::F& m, typename T::F& v, typename T::F g, const typename T::E* c) {
        if (c[l2] != 0) g = g + T::set(c[l2]) * p;
        m = lerp<T>(m, g, c[w1], c[rest1]);
        v = v * T::set(c[b2]) + (T::set(c[w2]) * g) * g;
        return m / (T::sqrt(v) * T::set(c[inverse_root_correction]) + T::set(c[eps]));
    }
    template <class T>
    ZOK_INLINE typename T::F apply(typename T::F& p, typename T::F& m, typename T::F& v, typename T::F g, const typename T::E* c) {
        const typename T::F u = direction<T>(p, m, v, g, c);
        p = p * T::set(c[decay]) + T::set(c[negative_step]) * u;
        return u;
    }
};

// LAMB's update direction, You et al. (arXiv 1904.00962, algorithm 2); the parameter waits for the norms of both.
struct Lamb {
    static constexpr bool kFirst = true, kSecond = true, kWritesUpdate = true;
    enum { weight_decay = Adam::negative_step, inverse_correction = Adam::decay };
    template <class T>
    ZOK_INLINE typename T::F apply(typename T::F& p, typename T::F& m, typename T::F& v, typename T::F g, const typename T::E* c) {
        const typename T::F u = Adam::direction<T>(p, m, v, g, c) * T::set(c[inverse_correction]);
        if (c[weight_decay] == 0) return u;
        return u + T::set(c[weight_decay]) * p;
    }
};

// Lion, Chen et al. (arXiv 2302.06675, algorithm 2).
struct Lion {
    static constexpr bool kFirst = true, kSecond = false, kWritesUpdate = false;
    enum { scale, decay, w1, rest1, w2, rest2, negative_step };
    template <class T>
    ZOK_INLINE typename T::F apply(typename T::F& p, typename T::F& m, typename T::F&, typename T::F g, const typename T::E* c) {
        const typename T::F u = Sign<T>::of(lerp<T>(m, g, c[w1], c[rest1]));
        p = p * T::set(c[decay]) + T::set(c[negative_step]) * u;
        m = lerp<T>(m, g, c[w2], c[rest2]);
        return u;
    }
};

// Adagrad, Duchi et al. (JMLR 12, 2011, figure 1), with torch.optim.Adagrad's weight decay and learning-rate decay.
struct Adagrad {
    static constexpr bool kFirst = false, kSecond = true, kWritesUpdate = false;
    enum { scale, l2, negative_step, eps };
    template <class T>
    ZOK_INLINE typename T::F apply(typename T::F& p, typename T::F&, typename T::F& v, typename T::F g, const typename T::E* c) {
        if (c[l2] != 0) g = g + T::set(c[l2]) * p;
        v = v + g * g;
        const typename T::F u = g / (T::sqrt(v) + T::set(c[eps]));
        p = p + T::set(c[negative_step]) * u;
        return u;
    }
};

// Stochastic gradient descent with torch.optim.SGD's momentum, dampening and Nesterov look-ahead.
struct Sgd {
    static constexpr bool kFirst = true, kSecond = false, kWritesUpdate = false;
    enum { scale, l2, negative_lr, momentum, keep, nesterov, first };
    template <class T>
    ZOK_INLINE typename T::F apply(typename T::F& p, typename T::F& m, typename T::F&, typename T::F g, const typename T::E* c) {
        if (c[l2] != 0) g = g + T::set(c[l2]) * p;
        m = c[first] != 0 ? g : m * T::set(c[momentum]) + T::set(c[keep]) * g;
        const typename T::F u = c[nesterov] != 0 ? g + T::set(c[momentum]) * m : m;
        p = p + T::set(c[negative_lr]) * u;
        return u;
    }
};
struct SgdPlain {
    static constexpr bool kFirst = false, kSecond = false, kWritesUpdate = false;
    template <class T>
    ZOK_INLINE typename T::F apply(typename T::F& p, typename T::F&, typename T::F&, typename T::F g, const typename T::E* c) {
        if (c[Sgd::l2] != 0) g = g + T::set(c[Sgd::l2]) * p;
        p = p + T::set(c[Sgd::negative_lr]) * g;
        return g;
    }
};
