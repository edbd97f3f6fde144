// A moment's loads before an update and its stores after it, by stored dtype: load<T>(i) and store<T>(i, x) within one piece; ask(i)
// prefetches an element that is read later.

// The operands of one update, all at the same element: inside one tile, one row and, for 8-bit state, one block.
struct Piece {
    const char* p;
    char* to;        // the new parameters: p, or memory apart from it
    const char* g;
    const char* state[2];
    char* state_to[2];
    float* wide[2];  // float32 scratch of an 8-bit block
    float scale[2];  // what its codes are multiplied with
    char* update;
    char* copy;      // written in the same loop, or null
    bool half;       // its dtype: f16, else bf16
    uint64_t key;    // of the second moment's random numbers
    uint32_t index;
    int64_t n;
    const Ahead* ahead;
    int64_t begin;   // in the run
};

// Memory for new values of `Item`s. They are written past the cache, which would read their lines first, where that memory is apart from the
// old values and the alignment allows it.
template <class Item>
struct Destination {
    Item* data;
    bool past;
    Destination(const char* old, char* to)
        : data(reinterpret_cast<Item*>(to)), past(to != old && reinterpret_cast<uintptr_t>(to) % (Vector::W * sizeof(Item)) == 0) {}
    template <class T>
    ZOK_MEMBER void store(int64_t i, typename T::F x) const {
        if (past) T::stream_lanes(data + i, T::bits(x));
        else T::store(data + i, x);
    }
    template <class T>
    ZOK_MEMBER void store_h(int64_t i, typename T::H x) const {
        if (past) T::stream_h(data + i, x);
        else T::store_h(data + i, x);
    }
};

template <bool kSecond>
struct NoState {
    static constexpr int64_t kItem = 0;  // bytes of an element
    static constexpr bool kAskedByEncoder = false;
    explicit NoState(const Piece&) {}
    template <class T>
    ZOK_MEMBER typename T::F load(int64_t) const { return T::set(0); }
    template <class T>
    ZOK_MEMBER void store(int64_t, typename T::F) {}
    ZOK_MEMBER void ask(int64_t) const {}
};

template <bool kSecond>
struct State32 {
    static constexpr int64_t kItem = 4;
    static constexpr bool kAskedByEncoder = false;
    const float* data;
    Destination<float> to;
    explicit State32(const Piece& x) : data(reinterpret_cast<const float*>(x.state[kSecond])), to(x.state[kSecond], x.state_to[kSecond]) {}
    template <class T>
    ZOK_MEMBER typename T::F load(int64_t i) const { return T::load(data + i); }
    template <class T>
    ZOK_MEMBER void store(int64_t i, typename T::F x) { to.template store<T>(i, x); }
    ZOK_MEMBER void ask(int64_t i) const { __builtin_prefetch(data + i); }
};

// The first moment is rounded to nearest; the second stochastically, or it could not decay.
template <bool kSecond>
struct State16 {
    static constexpr int64_t kItem = 2;
    static constexpr bool kAskedByEncoder = false;
    const uint16_t* data;
    Destination<uint16_t> to;
    uint64_t key;
    uint32_t index;
    explicit State16(const Piece& x)
        : data(reinterpret_cast<const uint16_t*>(x.state[kSecond])), to(x.state[kSecond], x.state_to[kSecond]), key(x.key), index(x.index) {}
    template <class T>
    ZOK_MEMBER typename T::F load(int64_t i) const { return T::from_bits(T::load_u16(data + i) << 16); }
    template <class T>
    ZOK_MEMBER void store(int64_t i, typename T::F x) {
        if constexpr (kSecond)
            to.template store_h<T>(i, T::narrow(bf16_stochastic<T>(x, random_bits<T>(key, index + static_cast<uint32_t>(i)) >> 16)));
        else to.template store_h<T>(i, T::narrow(bf16_nearest<T>(x)));
    }
    ZOK_MEMBER void ask(int64_t i) const { __builtin_prefetch(data + i); }
};

// New values wait in `wide` until the largest magnitude of the block is known.
template <bool kSecond>
struct State8 {
    static constexpr int64_t kItem = 1;
    static constexpr bool kAskedByEncoder = true;  // for parameters and gradients; codes are few
    const uint8_t* codes;
    float* wide;
    float scale;
    Largest largest;
    explicit State8(const Piece& x) : codes(reinterpret_cast<const uint8_t*>(x.state[kSecond])), wide(x.wide[kSecond]), scale(x.scale[kSecond]) {}
    template <class T>
    ZOK_MEMBER typename T::F load(int64_t i) const {
        if constexpr (kSecond) return u5e3_value<T>(T::load_u8(codes + i)) * T::set(scale);
        else return T::load_e4m3(codes + i, T::set(scale));
    }
    template <class T>
    ZOK_MEMBER void store(int64_t i, typename T::F x) {
        T::store(wide + i, x);
        largest.template note<T, !kSecond>(x);
    }
    ZOK_MEMBER void ask(int64_t) const {}
};
