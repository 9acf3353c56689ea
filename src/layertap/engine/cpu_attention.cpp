// Causal attention of a flat batch of sequences over a paged cache, for CPUs.
//
// A task is a tile of query rows of one key head; a row is a (token, query head of the group) pair. The tile's rows
// lie in the lanes of vectors, keys and values are read as scalars and broadcast: so keys and values are used where
// they lie, in the batch or in the cache, and the softmax of a row needs no sum across lanes. Softmax runs online over
// blocks of keys (as in FlashAttention, Dao et al. 2022), in float32 and base 2. bfloat16 inputs go through the
// processor's pair products where it has them (AVX512-BF16), with probabilities rounded to bfloat16 for the second
// product, or through its tile matrix unit (AMX, cpu_attention_amx.h); else everything is float32.
//
// Built by cpu_attention.py with -march=native; plain C interface, no PyTorch headers.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#define LAYERTAP_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;     // floats in a vector
constexpr int WIDE = 4;   // vectors of a wide tile: 6 x 4 accumulators, 4 loads and a broadcast fit into 32 registers
#else
constexpr int W = 8;
constexpr int WIDE = 2;   // 6 x 2 accumulators in 16 registers
#endif
constexpr int M = 6;      // keys (or value dims) that one pass over a tile computes
constexpr int BLOCK = 64; // keys at a time: what a tile needs for one block stays in the first caches
constexpr float MASKED = -1e30f;
constexpr float LOG2E = 1.44269504f;

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IntVec __attribute__((vector_size(W * 4)));

struct Call {
    const void *query, *key, *value;
    void *key_cache, *value_cache, *out;
    const float *sinks;                 // [query heads], or null
    const int64_t *starts, *contexts;   // [sequences + 1], [sequences]
    const int64_t *const *slots;        // for each sequence with a context: the slots of all its tokens
    const int64_t *mapping;             // [tokens]: the slots that their keys and values are put into first
    int64_t query_head, query_token, key_head, key_token, value_head, value_token;  // strides, in elements
    int64_t key_slot, key_slot_head, value_slot, value_slot_head, out_token, out_head;
    int64_t sequences, heads, kv_heads, key_dim, value_dim;
    int64_t window;                     // tokens that a query sees, itself included; 0: all
    int64_t threads;
    float scale, softcap;               // softcap 0: none
};

inline Vec exp2v(Vec x) {               // relative error 2e-7; below 2^-126 gives 2^-126; NaN stays NaN
    x = x < -126.0f ? Vec{} - 126.0f : x;
    x = x > 126.0f ? Vec{} + 126.0f : x;
    const Vec magic = Vec{} + 12583039.0f;  // 1.5 * 2^23 rounds to an integer n; 127 makes n the exponent of 2^n
    const Vec shifted = x + magic;
    const Vec f = x - (shifted - magic);
    Vec y = Vec{} + 1.5403530e-4f;          // Taylor series of 2^f, |f| <= 1/2
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    return y * (Vec)((IntVec)shifted << 23);  // adding n to the bits of y could make a number of a NaN
}

inline Vec tanhv(Vec x) { return 1.0f - 2.0f / (exp2v(x * (2 * LOG2E)) + 1.0f); }

inline Vec maxv(Vec a, Vec b) { return a < b ? b : a; }

struct Float32 {
    typedef float T;
    static float load(const T *p) { return *p; }
    static void store(T *p, float x) { *p = x; }
};

struct BFloat16 {
    typedef uint16_t T;
    static float load(const T *p) {
        const uint32_t bits = (uint32_t)*p << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    static void store(T *p, float x) {      // to the nearest, ties to even
        uint32_t bits;
        memcpy(&bits, &x, 4);
        *p = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

// How the two products of attention are made. Singles: one float32 after the other, from elements of any type.
template <class Element> struct Singles {
    typedef Element E;
    typedef typename E::T T;
    static constexpr int PACK = 1;      // elements that one lane of a packed query holds

    template <int N> static void pack_query(float *packed, const T *row, int64_t dim, int lane) {
        for (int64_t d = 0; d < dim; d++) packed[d * N * W + lane] = E::load(row + d);
    }
    // Scores of m keys against the tile's rows.
    template <int m, int N> static void scores(Vec *out, const float *query, const T *const *keys, int64_t dim) {
        Vec acc[m][N] = {};
        for (int64_t d = 0; d < dim; d++) {
            const Vec *q = (const Vec *)query + d * N;
            for (int i = 0; i < m; i++)
                for (int n = 0; n < N; n++) acc[i][n] += q[n] * E::load(keys[i] + d);
        }
        for (int i = 0; i < m; i++)
            for (int n = 0; n < N; n++) out[i * N + n] = acc[i][n];
    }
    template <int N> static void pack_probabilities(float *, const Vec *, int) {}
    static void pack_values(float *packed, const T *const *values, int count, int64_t dim) {
        for (int j = 0; j < count; j++)
            for (int64_t d = 0; d < dim; d++) packed[j * dim + d] = E::load(values[j] + d);
    }
    // m dims of the output: rescaled, and the block's values added.
    template <int m, int N>
    static void accumulate(Vec *out, const Vec *alpha, const Vec *p, const float *, const float *values, int count, int64_t dim) {
        Vec acc[m][N];
        for (int i = 0; i < m; i++)
            for (int n = 0; n < N; n++) acc[i][n] = out[i * N + n] * alpha[n];
        for (int j = 0; j < count; j++)
            for (int i = 0; i < m; i++)
                for (int n = 0; n < N; n++) acc[i][n] += p[j * N + n] * values[j * dim + i];
        for (int i = 0; i < m; i++)
            for (int n = 0; n < N; n++) out[i * N + n] = acc[i][n];
    }
};

#if defined(__AVX512BF16__)
// Two bfloat16 products at a time, summed in float32.
struct Pairs {
    typedef BFloat16 E;
    typedef uint16_t T;
    static constexpr int PACK = 2;

    static __m512bh bits(const void *p) { return (__m512bh)_mm512_loadu_si512(p); }
    static __m512bh broadcast(const void *p) {
        int32_t pair;
        memcpy(&pair, p, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    template <int N> static void pack_query(float *packed, const T *row, int64_t dim, int lane) {
        for (int64_t d = 0; d < dim / 2; d++) memcpy(packed + d * N * W + lane, row + 2 * d, 4);
    }
    template <int m, int N> static void scores(Vec *out, const float *query, const T *const *keys, int64_t dim) {
        __m512 acc[m][N] = {};
        for (int64_t d = 0; d < dim / 2; d++) {
            __m512bh q[N];
            for (int n = 0; n < N; n++) q[n] = bits(query + (d * N + n) * W);
            for (int i = 0; i < m; i++) {
                const __m512bh k = broadcast(keys[i] + 2 * d);
                for (int n = 0; n < N; n++) acc[i][n] = _mm512_dpbf16_ps(acc[i][n], q[n], k);
            }
        }
        for (int i = 0; i < m; i++)
            for (int n = 0; n < N; n++) out[i * N + n] = (Vec)acc[i][n];
    }
    template <int N> static void pack_probabilities(float *packed, const Vec *p, int count) {
        for (int j = 0; j < count; j += 2)
            for (int n = 0; n < N; n++) {
                const __m512 odd = j + 1 < count ? (__m512)p[(j + 1) * N + n] : _mm512_setzero_ps();
                const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)p[j * N + n]));
                const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
                _mm512_storeu_si512(packed + (j / 2 * N + n) * W, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
    }
    static void pack_values(float *packed, const T *const *values, int count, int64_t dim) {
        uint32_t *to = (uint32_t *)packed;
        for (int j = 0; j < count; j += 2)
            for (int64_t d = 0; d < dim; d++)
                to[j / 2 * dim + d] = values[j][d] | (j + 1 < count ? (uint32_t)values[j + 1][d] << 16 : 0);
    }
    template <int m, int N>
    static void accumulate(Vec *out, const Vec *alpha, const Vec *, const float *p, const float *values, int count, int64_t dim) {
        __m512 acc[m][N];
        for (int i = 0; i < m; i++)
            for (int n = 0; n < N; n++) acc[i][n] = (__m512)(out[i * N + n] * alpha[n]);
        for (int j = 0; j < (count + 1) / 2; j++) {
            __m512bh pair[N];
            for (int n = 0; n < N; n++) pair[n] = bits(p + (j * N + n) * W);
            for (int i = 0; i < m; i++) {
                const __m512bh v = broadcast(values + j * dim + i);
                for (int n = 0; n < N; n++) acc[i][n] = _mm512_dpbf16_ps(acc[i][n], pair[n], v);
            }
        }
        for (int i = 0; i < m; i++)
            for (int n = 0; n < N; n++) out[i * N + n] = (Vec)acc[i][n];
    }
};
#endif

// Calls f.template operator()<m>(first) for first = 0, M, 2 M ... and the rest.
template <int m, class F> void remainder(int64_t first, int64_t left, F &f) {
    if constexpr (m > 0) {
        if (left == m) f.template operator()<m>(first);
        else remainder<m - 1>(first, left, f);
    }
}
template <class F> void in_groups(int64_t count, F f) {
    int64_t first = 0;
    for (; first + M <= count; first += M) f.template operator()<M>(first);
    remainder<M - 1>(first, count - first, f);
}

struct Scratch {
    float *query, *scores, *probabilities, *values, *out;
    explicit Scratch(const Call &c) {
        const int64_t lanes = W * WIDE;
        const int64_t sizes[] = {c.key_dim * lanes, BLOCK * lanes, BLOCK * lanes, BLOCK * c.value_dim, c.value_dim * lanes};
        int64_t total = 0;
        for (int64_t s : sizes) total += (s + 15) / 16 * 16;
        memory = (float *)aligned_alloc(64, total * 4);
        float **parts[] = {&query, &scores, &probabilities, &values, &out};
        float *next = memory;
        for (int i = 0; i < 5; i++) {
            *parts[i] = next;
            next += (sizes[i] + 15) / 16 * 16;
        }
    }
    ~Scratch() { free(memory); }
    Scratch(const Scratch &) = delete;
    float *memory;
};

template <class P, int N> struct ScoresOf {
    Vec *out;
    const float *query;
    const typename P::T *const *keys;
    int64_t dim;
    template <int m> void operator()(int64_t first) { P::template scores<m, N>(out + first * N, query, keys + first, dim); }
};
template <class P, int N> struct Accumulate {
    Vec *out;
    const Vec *alpha, *p;
    const float *packed, *values;
    int count;
    int64_t dim;
    template <int m> void operator()(int64_t first) {
        P::template accumulate<m, N>(out + first * N, alpha, p, packed, values + first, count, dim);
    }
};

struct Task {
    int64_t sequence, kv_head, first_row, cost;
};

template <class P, int N> void run_tile(const Call &c, const Task &task, Scratch &scratch) {
    typedef typename P::T T;
    constexpr int LANES = N * W;
    const int64_t group = c.heads / c.kv_heads;
    const int64_t start = c.starts[task.sequence], tokens = c.starts[task.sequence + 1] - start;
    const int64_t context = c.contexts[task.sequence], rows = tokens * group;
    const int lanes = (int)std::min<int64_t>(LANES, rows - task.first_row);
    const int64_t *slots = context ? c.slots[task.sequence] : nullptr;

    IntVec position[N];                  // of each lane's token; lanes without a row repeat the last one
    Vec highest[N], sum[N];              // running maximum and sum of the softmax
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t row = task.first_row + std::min(lane, lanes - 1);
        const int64_t token = row / group, head = task.kv_head * group + row % group;
        ((int32_t *)position)[lane] = (int32_t)(context + token);
        ((float *)highest)[lane] = c.sinks ? c.sinks[head] * LOG2E : MASKED;
        ((float *)sum)[lane] = c.sinks ? 1.0f : 0.0f;
        P::template pack_query<N>(scratch.query, (const T *)c.query + head * c.query_head + (start + token) * c.query_token,
                                  c.key_dim, lane);
    }
    const int64_t lowest = context + task.first_row / group;
    const int64_t end = context + (task.first_row + lanes - 1) / group + 1;
    const int64_t begin = c.window ? std::max<int64_t>(0, lowest - c.window + 1) : 0;
    Vec *s = (Vec *)scratch.scores, *out = (Vec *)scratch.out;
    std::fill(out, out + c.value_dim * N, Vec{});

    for (int64_t block = begin; block < end; block += BLOCK) {
        const int count = (int)std::min<int64_t>(BLOCK, end - block);
        const T *keys[BLOCK], *values[BLOCK];
        for (int j = 0; j < count; j++) {
            const int64_t at = slots ? slots[block + j] : start + block + j;
            keys[j] = slots ? (const T *)c.key_cache + at * c.key_slot + task.kv_head * c.key_slot_head
                            : (const T *)c.key + at * c.key_token + task.kv_head * c.key_head;
            values[j] = slots ? (const T *)c.value_cache + at * c.value_slot + task.kv_head * c.value_slot_head
                              : (const T *)c.value + at * c.value_token + task.kv_head * c.value_head;
        }
        in_groups(count, ScoresOf<P, N>{s, scratch.query, keys, c.key_dim});

        const bool masked = block + count - 1 > lowest || (c.window && block <= end - 1 - c.window);
        Vec top[N];
        for (int n = 0; n < N; n++) top[n] = highest[n];
        for (int j = 0; j < count; j++)
            for (int n = 0; n < N; n++) {
                Vec x = s[j * N + n];
                x = c.softcap ? tanhv(x * (c.scale / c.softcap)) * (c.softcap * LOG2E) : x * (c.scale * LOG2E);
                if (masked) {
                    const int32_t at = (int32_t)(block + j);
                    IntVec seen = position[n] >= at;
                    if (c.window) seen &= position[n] - (int32_t)c.window < at;
                    x = seen ? x : Vec{} + MASKED;
                }
                s[j * N + n] = x;
                top[n] = maxv(top[n], x);
            }
        Vec alpha[N];
        for (int n = 0; n < N; n++) {
            alpha[n] = exp2v(highest[n] - top[n]);
            highest[n] = top[n];
            sum[n] *= alpha[n];
        }
        for (int j = 0; j < count; j++)
            for (int n = 0; n < N; n++) {
                const Vec p = exp2v(s[j * N + n] - top[n]);
                sum[n] += p;
                s[j * N + n] = p;
            }
        P::template pack_probabilities<N>(scratch.probabilities, s, count);
        P::pack_values(scratch.values, values, count, c.value_dim);
        in_groups(c.value_dim, Accumulate<P, N>{out, alpha, s, scratch.probabilities, scratch.values, count, c.value_dim});
    }
    T *to[LANES];
    for (int lane = 0; lane < lanes; lane++) {
        const int64_t row = task.first_row + lane;
        to[lane] = (T *)c.out + (start + row / group) * c.out_token + (task.kv_head * group + row % group) * c.out_head;
    }
    for (int64_t d = 0; d < c.value_dim; d++) {
        T column[LANES];
        for (int n = 0; n < N; n++) out[d * N + n] /= sum[n];
        for (int lane = 0; lane < LANES; lane++) P::E::store(column + lane, scratch.out[d * LANES + lane]);
        for (int lane = 0; lane < lanes; lane++) to[lane][d] = column[lane];
    }
}

// A thread's part of the work: takes tiles of up to ROWS rows, one after the other.
template <class P> struct Vectors {
    typedef typename P::T T;
    static constexpr int ROWS = W * WIDE;
    const Call &c;
    Scratch scratch;
    explicit Vectors(const Call &call) : c(call), scratch(call) {}
    void run(const Task &task, int64_t rows) {
        if (rows <= W) run_tile<P, 1>(c, task, scratch);
        else run_tile<P, WIDE>(c, task, scratch);
    }
};

#if defined(LAYERTAP_AMX)
#include "cpu_attention_amx.h"
#endif

template <class T> void store(const Call &c, int64_t token) {
    for (int64_t head = 0; head < c.kv_heads; head++) {
        memcpy((T *)c.key_cache + c.mapping[token] * c.key_slot + head * c.key_slot_head,
               (const T *)c.key + token * c.key_token + head * c.key_head, c.key_dim * sizeof(T));
        memcpy((T *)c.value_cache + c.mapping[token] * c.value_slot + head * c.value_slot_head,
               (const T *)c.value + token * c.value_token + head * c.value_head, c.value_dim * sizeof(T));
    }
}

template <class Worker> void run(const Call &c) {
    const int64_t group = c.heads / c.kv_heads;
    std::vector<Task> tasks;
    for (int64_t i = 0; i < c.sequences; i++) {
        const int64_t rows = (c.starts[i + 1] - c.starts[i]) * group;
        for (int64_t first = 0; first < rows; first += Worker::ROWS)
            for (int64_t head = 0; head < c.kv_heads; head++) {
                int64_t keys = c.contexts[i] + first / group;
                if (c.window) keys = std::min(keys, c.window);
                tasks.push_back({i, head, first, keys + BLOCK});
            }
    }
    // The longest first, so that the threads end together; the same keys one after the other.
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task &a, const Task &b) { return a.cost > b.cost; });
    const int64_t count = (int64_t)tasks.size();
#pragma omp parallel num_threads((int)std::min(c.threads, count))
    {
        // All of them go in before any is read: sequences of one step may share blocks.
#pragma omp for schedule(static)
        for (int64_t t = c.starts[0]; t < c.starts[c.sequences]; t++) store<typename Worker::T>(c, t);
        Worker worker(c);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++) {
            const int64_t rows = (c.starts[tasks[i].sequence + 1] - c.starts[tasks[i].sequence]) * group;
            worker.run(tasks[i], rows - tasks[i].first_row);
        }
    }
}

}  // namespace

extern "C" void layertap_attention_float32(const Call *c) { run<Vectors<Singles<Float32>>>(*c); }

extern "C" void layertap_attention_bfloat16(const Call *c) {
#if defined(LAYERTAP_AMX)
    if (Matrices::compute(*c)) return run<Matrices>(*c);
#endif
#if defined(__AVX512BF16__)
    if (c->key_dim % 2 == 0) return run<Vectors<Pairs>>(*c);
#endif
    run<Vectors<Singles<BFloat16>>>(*c);
}
