// The same on a tile matrix unit (AMX-BF16): included by cpu_attention.cpp, inside its namespace.
//
// Rows lie in lanes here, too: a tile register takes 16 keys x 32 dims as they lie in memory, and gives 16 keys x 16
// rows of scores. For the second product the block's values are transposed, 32 keys to a dim's row. What is left to the
// vector units is the softmax, which takes most of the time: rows whose maximum grows by less than 2^8 in a block are
// not rescaled (as in FlashAttention-4), since sums in float32 and probabilities in bfloat16 lose nothing by it.

struct Matrices {
    typedef uint16_t T;
    static constexpr int N = 6;             // vectors of rows in a task
    static constexpr int ROWS = N * 16;
    static constexpr int KEYS = 128;        // keys at a time
    static constexpr float SLACK = 8.0f;    // log2 of what a probability may be above 1

    static bool compute(const Call &c) {
        static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
        return allowed && c.key_dim % 32 == 0 && c.value_dim % 32 == 0 && c.scale > 0;
    }

    const Call &c;
    Vectors<Pairs> vectors;                 // for tasks of few rows
    uint32_t *query, *probabilities;        // [key_dim / 2][ROWS], [KEYS / 2][ROWS]: pairs of bfloat16
    float *scores, *out;                    // [KEYS][ROWS], [value_dim][ROWS]
    uint16_t *keys, *values;                // [KEYS][key_dim], [value_dim][KEYS]
    std::unique_ptr<void, void (*)(void *)> memory{nullptr, free};

    explicit Matrices(const Call &call) : c(call), vectors(call) {
        const int64_t sizes[] = {c.key_dim / 2 * ROWS * 4, KEYS / 2 * ROWS * 4, KEYS * ROWS * 4,
                                 c.value_dim * ROWS * 4,   KEYS * c.key_dim * 2, c.value_dim * KEYS * 2};
        int64_t total = 0;
        for (int64_t s : sizes) total += s;  // each a multiple of 64
        memory.reset(aligned_alloc(64, total));
        char *next = (char *)memory.get();
        query = (uint32_t *)next;
        probabilities = (uint32_t *)(next += sizes[0]);
        scores = (float *)(next += sizes[1]);
        out = (float *)(next += sizes[2]);
        keys = (uint16_t *)(next += sizes[3]);
        values = (uint16_t *)(next += sizes[4]);
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        visible(&config);
        _tile_loadconfig(&config);
    }
    ~Matrices() { _tile_release(); }

    // What was stored is in memory: the compiler's tile loads do not tell it what they read.
    static void visible(const void *stored) { __asm__ volatile("" : : "r"(stored) : "memory"); }

    void run(const Task &task, int64_t rows) {
        if (rows <= 16) vectors.run(task, rows);
        else tile(task, (int)std::min<int64_t>(rows, ROWS));
    }

    static __m512 exp2(__m512 x) {  // for x <= SLACK; relative error 3e-6; below 2^-126 gives 2^-126 (subnormals are slow); NaN stays NaN
        x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);
        const __m512 magic = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23 rounds to an integer
        const __m512 n = _mm512_sub_ps(_mm512_add_ps(x, magic), magic);
        const __m512 f = _mm512_sub_ps(x, n);
        __m512 y = _mm512_set1_ps(1.3333558e-3f);          // Taylor series of 2^f, |f| <= 1/2
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
        return _mm512_scalef_ps(y, n);
    }

    static void transpose(__m512i r[16]) {  // 16 x 16 elements of 32 bits
        __m512i t[16];
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        for (int i = 0; i < 4; i++) {       // r[4 * a + i] holds, in each quarter q, column 4 * q + i of rows 4a to 4a + 3
            const __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
            const __m512i d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), e = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
            t[i] = _mm512_shuffle_i32x4(a, d, 0x88);
            t[8 + i] = _mm512_shuffle_i32x4(a, d, 0xdd);
            t[4 + i] = _mm512_shuffle_i32x4(b, e, 0x88);
            t[12 + i] = _mm512_shuffle_i32x4(b, e, 0xdd);
        }
        for (int i = 0; i < 16; i++) r[i] = t[i];
    }

    // Tiles 0 to 3, 32 rows x 32 columns of float32, += 32 rows of a x 32 columns of b, over 32 bfloat16 of depth.
    static void multiply(const uint16_t *a, int64_t stride, const uint32_t *b) {
        _tile_loadd(4, a, stride * 2);
        _tile_loadd(5, a + 16 * stride, stride * 2);
        _tile_loadd(6, b, ROWS * 4);
        _tile_loadd(7, b + 16, ROWS * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }

    static void put(float *to) {
        _tile_stored(0, to, ROWS * 4);
        _tile_stored(1, to + 16, ROWS * 4);
        _tile_stored(2, to + 16 * ROWS, ROWS * 4);
        _tile_stored(3, to + 16 * ROWS + 16, ROWS * 4);
    }

    // scores[j][row] for the block's keys.
    void first_product(const uint16_t *from, int64_t stride, int count) {
        visible(query);
        for (int j = 0; j < count; j += 32)
            for (int n = 0; n < N; n += 2) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int64_t d = 0; d < c.key_dim; d += 32)
                    multiply(from + j * stride + d, stride, query + d / 2 * ROWS + n * 16);
                put(scores + j * ROWS + n * 16);
            }
    }

    // out[dim][row] += values and probabilities of the block.
    void second_product(int count) {
        visible(probabilities);
        for (int64_t d = 0; d < c.value_dim; d += 32)
            for (int n = 0; n < N; n += 2) {
                float *to = out + d * ROWS + n * 16;
                _tile_loadd(0, to, ROWS * 4);
                _tile_loadd(1, to + 16, ROWS * 4);
                _tile_loadd(2, to + 16 * ROWS, ROWS * 4);
                _tile_loadd(3, to + 16 * ROWS + 16, ROWS * 4);
                for (int j = 0; j < count; j += 32)
                    multiply(values + d * KEYS + j, KEYS, probabilities + j / 2 * ROWS + n * 16);
                put(to);
            }
    }

    // values[dim][key] of the block, zeros up to a multiple of 32 keys.
    void transpose_values(const uint16_t *const *from, int count) {
        alignas(64) static constexpr uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        const __m512i low = _mm512_load_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (int j = 0; j < count; j += 32)
            for (int64_t d = 0; d < c.value_dim; d += 32) {
                __m512i first[16], second[16];  // pairs of keys x dims d to d + 15, d + 16 to d + 31
                for (int i = 0; i < 16; i++) {
                    const int even = j + 2 * i, odd = even + 1;
                    const __m512i a = even < count ? _mm512_loadu_si512(from[even] + d) : _mm512_setzero_si512();
                    const __m512i b = odd < count ? _mm512_loadu_si512(from[odd] + d) : _mm512_setzero_si512();
                    first[i] = _mm512_permutex2var_epi16(a, low, b);
                    second[i] = _mm512_permutex2var_epi16(a, high, b);
                }
                transpose(first);
                transpose(second);
                for (int i = 0; i < 16; i++) {
                    _mm512_store_si512(values + (d + i) * KEYS + j, first[i]);
                    _mm512_store_si512(values + (d + 16 + i) * KEYS + j, second[i]);
                }
            }
    }

    void tile(const Task &task, int lanes) {
        const int64_t group = c.heads / c.kv_heads;
        const int64_t start = c.starts[task.sequence], context = c.contexts[task.sequence];
        const int64_t *slots = context ? c.slots[task.sequence] : nullptr;
        const uint16_t *rows[ROWS];
        __m512i position[N];
        __m512 highest[N], sum[N];          // running maximum (in units of log2) and sum of the softmax
        for (int lane = 0; lane < ROWS; lane++) {  // lanes without a row repeat the last one
            const int64_t row = task.first_row + std::min(lane, lanes - 1);
            const int64_t token = row / group, head = task.kv_head * group + row % group;
            ((int32_t *)position)[lane] = (int32_t)(context + token);
            ((float *)highest)[lane] = c.sinks ? c.sinks[head] * LOG2E : MASKED;
            ((float *)sum)[lane] = c.sinks ? 1.0f : 0.0f;
            rows[lane] = (const uint16_t *)c.query + head * c.query_head + (start + token) * c.query_token;
        }
        for (int n = 0; n < N; n++)
            for (int64_t d = 0; d < c.key_dim; d += 32) {
                __m512i r[16];
                for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[n * 16 + i] + d);
                transpose(r);
                for (int i = 0; i < 16; i++) _mm512_store_si512(query + (d / 2 + i) * ROWS + n * 16, r[i]);
            }
        const int64_t lowest = context + task.first_row / group;
        const int64_t end = context + (task.first_row + lanes - 1) / group + 1;
        const int64_t begin = c.window ? std::max<int64_t>(0, lowest - c.window + 1) : 0;
        std::fill(out, out + c.value_dim * ROWS, 0.0f);
        for (int64_t block = begin; block < end; block += KEYS) {
            const int count = (int)std::min<int64_t>(KEYS, end - block);
            const uint16_t *value_rows[KEYS];
            for (int j = 0; j < count; j++)
                value_rows[j] = slots ? (const uint16_t *)c.value_cache + slots[block + j] * c.value_slot + task.kv_head * c.value_slot_head
                                      : (const uint16_t *)c.value + (start + block + j) * c.value_token + task.kv_head * c.value_head;
            const uint16_t *block_keys = (const uint16_t *)c.key + (start + block) * c.key_token + task.kv_head * c.key_head;
            int64_t stride = c.key_token;
            // Keys are read in groups of 32: those that lie in the cache, or too near the batch's end, are copied.
            if (slots || start + block + (count + 31) / 32 * 32 > c.starts[c.sequences]) {
                for (int j = 0; j < count; j++)
                    memcpy(keys + j * c.key_dim,
                           slots ? (const uint16_t *)c.key_cache + slots[block + j] * c.key_slot + task.kv_head * c.key_slot_head
                                 : block_keys + j * stride,
                           c.key_dim * 2);
                block_keys = keys;
                stride = c.key_dim;
            }
            first_product(block_keys, stride, count);
            const bool masked = block + count - 1 > lowest || (c.window && block <= end - 1 - c.window);
            softmax(count, (int32_t)block, masked, position, highest, sum);
            transpose_values(value_rows, count);
            second_product(count);
        }
        write(task, lanes, sum);
    }

    // Scores become probabilities, in pairs of keys; what is summed up so far is rescaled where the maximum needs it.
    void softmax(int count, int32_t block, bool masked, const __m512i *position, __m512 *highest, __m512 *sum) {
        const __m512 factor = _mm512_set1_ps(c.softcap ? LOG2E : c.scale * LOG2E);
        if (c.softcap) {
            Vec *s = (Vec *)scores;
            for (int i = 0; i < count * N; i++) s[i] = tanhv(s[i] * (c.scale / c.softcap)) * c.softcap;
        }
        for (int n = 0; n < N; n++) {
            float *s = scores + n * 16;
            __m512 top = _mm512_set1_ps(MASKED);
            if (masked)
                for (int j = 0; j < count; j++) {
                    const __m512i at = _mm512_set1_epi32(block + j);
                    __mmask16 seen = _mm512_cmpge_epi32_mask(position[n], at);
                    if (c.window)
                        seen &= _mm512_cmplt_epi32_mask(_mm512_sub_epi32(position[n], _mm512_set1_epi32((int32_t)c.window)), at);
                    const __m512 x = _mm512_mask_mov_ps(_mm512_set1_ps(MASKED), seen, _mm512_load_ps(s + j * ROWS));
                    _mm512_store_ps(s + j * ROWS, x);
                    top = _mm512_max_ps(x, top);
                }
            else
                for (int j = 0; j < count; j++) top = _mm512_max_ps(_mm512_load_ps(s + j * ROWS), top);
            top = _mm512_mul_ps(top, factor);
            if (_mm512_cmp_ps_mask(top, _mm512_add_ps(highest[n], _mm512_set1_ps(SLACK)), _CMP_GT_OQ)) {
                top = _mm512_max_ps(top, highest[n]);
                const __m512 alpha = exp2(_mm512_sub_ps(highest[n], top));
                highest[n] = top;
                sum[n] = _mm512_mul_ps(sum[n], alpha);
                for (int64_t d = 0; d < c.value_dim; d++) {
                    float *x = out + d * ROWS + n * 16;
                    _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), alpha));
                }
            }
            const __m512 low = highest[n];
            uint32_t *p = probabilities + n * 16;
            alignas(64) static constexpr uint16_t PAIR[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
            const __m512i pair = _mm512_load_si512(PAIR);
            const auto probability = [&](int j) {
                return exp2(_mm512_fmsub_ps(_mm512_load_ps(s + j * ROWS), factor, low));
            };
            __m512 evens = sum[n], odds = _mm512_setzero_ps();
            int j = 0;
            for (; j < count; j += 2) {
                const __m512 even = probability(j), odd = j + 1 < count ? probability(j + 1) : _mm512_setzero_ps();
                evens = _mm512_add_ps(evens, even);
                odds = _mm512_add_ps(odds, odd);
                _mm512_store_si512(p + j / 2 * ROWS, _mm512_permutexvar_epi16(pair, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
            }
            for (; j % 32; j += 2) _mm512_store_si512(p + j / 2 * ROWS, _mm512_setzero_si512());
            sum[n] = _mm512_add_ps(evens, odds);
        }
    }

    void write(const Task &task, int lanes, const __m512 *sum) {
        const int64_t group = c.heads / c.kv_heads, start = c.starts[task.sequence];
        for (int n = 0; n * 16 < lanes; n++) {
            const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), sum[n]);
            for (int64_t d = 0; d < c.value_dim; d += 16) {
                __m512i r[16];
                for (int i = 0; i < 16; i++)
                    r[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(out + (d + i) * ROWS + n * 16), inverse);
                transpose(r);
                for (int i = 0; i < 16 && n * 16 + i < lanes; i++) {
                    const int64_t row = task.first_row + n * 16 + i;
                    uint16_t *to = (uint16_t *)c.out + (start + row / group) * c.out_token + (task.kv_head * group + row % group) * c.out_head;
                    _mm256_storeu_si256((__m256i *)(to + d), (__m256i)_mm512_cvtneps_pbh((__m512)r[i]));
                }
            }
        }
    }
};
