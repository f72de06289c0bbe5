// Products by matrix units (AMX): tiles of 16 rows by 32 of k. One TDPBF16PS is, as Intel's manual defines it, 32 of k in the
// order of Arithmetic::exact. What emulates the unit is compiled into every form, so that the same code is tried everywhere.
#include <initializer_list>
#include <type_traits>

#include "tiles.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace motet {
namespace {

constexpr int64_t AHEAD = 4096;     // bytes of B that the first rows fetch in advance: the others find them
constexpr int C = 0, A = 4, B = 6;  // tiles: C has two rows of two, A one below the other, B side by side

struct alignas(64) Shapes {  // what LDTILECFG reads
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(MOTET_AMX)
struct Unit {  // by name, because a compiler's functions take literals only
    void shape(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    template <int T>
    void clear() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
    template <int T>
    void read(const void* from, int64_t step) { asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(T) : "memory"); }
    template <int T>
    void write(void* to, int64_t step) { asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step), "i"(T) : "memory"); }
    template <int TC, int TA, int TB>
    void multiply() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TC), "i"(TA), "i"(TB)); }
    ~Unit() { asm volatile("tilerelease"); }
};
#endif

struct Emulated {
    Shapes shapes;
    alignas(64) char tiles[8][16][64];

    void shape(const Shapes& given) { shapes = given; }
    template <int T>
    void clear() { std::memset(tiles[T], 0, sizeof tiles[T]); }
    template <int T>
    void read(const void* from, int64_t step) {
        for (int r = 0; r < shapes.rows[T]; r++)
            std::memcpy(tiles[T][r], static_cast<const char*>(from) + r * step, shapes.bytes[T]);
    }
    template <int T>
    void write(void* to, int64_t step) {
        for (int r = 0; r < shapes.rows[T]; r++)
            std::memcpy(static_cast<char*>(to) + r * step, tiles[T][r], shapes.bytes[T]);
    }
    // The pseudocode of TDPBF16PS; denormals are flushed by the caller's mode.
    template <int TC, int TA, int TB>
    void multiply() {
        for (int m = 0; m < shapes.rows[TC]; m++) {
            float sums[32] = {};
            for (int k = 0; k < shapes.bytes[TA] / 4; k++)
                for (int n = 0; n < shapes.bytes[TC] / 4; n++)
                    for (int i = 0; i < 2; i++)
                        sums[2 * n + i] = std::fma(number<TA>(m, 2 * k + i), number<TB>(k, 2 * n + i), sums[2 * n + i]);
            for (int n = 0; n < shapes.bytes[TC] / 4; n++) {
                float* c = reinterpret_cast<float*>(tiles[TC][m]) + n;
                const float both = sums[2 * n] + sums[2 * n + 1];
                *c = *c + both;
            }
        }
    }
    template <int T>
    float number(int row, int column) const { return from_bf16(reinterpret_cast<const bf16*>(tiles[T][row])[column]); }
};

// Rows [first, first + rows) and one or two units of columns; `rows` is at most 32.
template <class Tiles>
void block(Tiles& tiles, const Product& p, int64_t first, int64_t rows, int64_t unit, bool two) {
    const int64_t columns = (two ? 2 : 1) * LANES, left = p.n - unit * LANES, step = round_up(p.b_k, 2) * 32;
    const bool below = rows > 16;
    float part[32 * 2 * LANES], *c = p.c + first * p.ldc + unit * LANES;
    int64_t ldc = p.ldc;
    if (left < columns) {  // the end of the columns goes through whole tiles
        for (int64_t r = 0; p.add && r < rows; r++) std::memcpy(part + r * columns, c + r * ldc, left * 4);
        c = part;
        ldc = columns;
    }
    const auto with_c = [&](auto&& each) {
        each(std::integral_constant<int, C>{}, c);
        if (two) each(std::integral_constant<int, C + 1>{}, c + LANES);
        if (below) each(std::integral_constant<int, C + 2>{}, c + 16 * ldc);
        if (below && two) each(std::integral_constant<int, C + 3>{}, c + 16 * ldc + LANES);
    };
    with_c([&](auto tile, float* at) {
        if (p.add)
            tiles.template read<tile>(at, ldc * 4);
        else
            tiles.template clear<tile>();
    });
    const bf16* a = static_cast<const bf16*>(p.a) + first * p.lda;
    const char* b = static_cast<const char*>(p.b) + unit * step;
    for (int64_t k = 0; k < p.k; k += 32) {
        const int64_t place = k * 32 + AHEAD, later = two && place >= step ? place + step : place;
        for (int64_t line = later; first == 0 && line < later + 1024; line += 256) {  // a line of four
            __builtin_prefetch(b + line);
            if (two) __builtin_prefetch(b + step + line);
        }
        tiles.template read<A>(a + k, p.lda * 2);
        tiles.template read<B>(b + k * 32, 64);
        tiles.template multiply<C, A, B>();
        if (two) {
            tiles.template read<B + 1>(b + step + k * 32, 64);
            tiles.template multiply<C + 1, A, B + 1>();
        }
        if (!below) continue;
        tiles.template read<A + 1>(a + 16 * p.lda + k, p.lda * 2);
        tiles.template multiply<C + 2, A + 1, B>();
        if (two) tiles.template multiply<C + 3, A + 1, B + 1>();
    }
    with_c([&](auto tile, float* at) { tiles.template write<tile>(at, ldc * 4); });
    if (left < columns)
        for (int64_t r = 0; r < rows; r++) std::memcpy(p.c + (first + r) * p.ldc + unit * LANES, part + r * columns, left * 4);
}

template <class Tiles>
void multiply_by(Tiles& tiles, const Product& p) {
    const int64_t units = round_up(p.n, LANES) / LANES, deep = p.k < 32 ? p.k : 32;
    int64_t shaped = 0;
    for (int64_t u = 0; u < units; u += 2)
        for (int64_t m = 0; m < p.m; m += 32) {
            const int64_t rows = p.m - m < 32 ? p.m - m : 32;
            if (rows != shaped) {
                Shapes shapes;
                for (int tile = 0; tile < 8; tile++) shapes.bytes[tile] = 64;
                for (int tile : {A, A + 1}) shapes.bytes[tile] = static_cast<uint16_t>(2 * deep);
                const auto upper = static_cast<uint8_t>(rows < 16 ? rows : 16), lower = static_cast<uint8_t>(rows - upper);
                for (int tile : {C, C + 1, A}) shapes.rows[tile] = upper;
                for (int tile : {C + 2, C + 3, A + 1}) shapes.rows[tile] = lower ? lower : upper;  // none has no rows
                for (int tile : {B, B + 1}) shapes.rows[tile] = static_cast<uint8_t>(deep / 2);
                tiles.shape(shapes);
                shaped = rows;
            }
            block(tiles, p, m, rows, u, u + 1 < units);
        }
}

}  // namespace

void product_by_tiles(const Product& p, bool emulated) {
    if (emulated) {
        Emulated tiles;
        return multiply_by(tiles, p);
    }
#if defined(MOTET_AMX)
    Unit tiles;
    multiply_by(tiles, p);
#else
    std::abort();
#endif
}

bool amx_runs() {
#if defined(__x86_64__) && defined(__linux__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c & (1u << 27))) return false;         // XGETBV
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 5) != 5) return false;         // AMX-BF16, AMX-TILE
    unsigned low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return false;                     // the system keeps shapes and tiles
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;            // ARCH_REQ_XCOMP_PERM for tiles, once a process
#else
    return false;
#endif
}

}  // namespace motet
