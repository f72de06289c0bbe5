// Packing, and products of packed matrices.
#include "tiles.hpp"

namespace motet {

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

int64_t packed_bytes(Type type, int64_t k, int64_t n) {
    return round_up(n, LANES) * (type == Type::bf16 ? round_up(k, 2) * 2 : k * 4);
}

namespace {

int64_t unit_bytes(Type type, int64_t k) { return packed_bytes(type, k, LANES); }

float number(Type type, const void* source, int64_t place) {
    return type == Type::f32 ? static_cast<const float*>(source)[place] : from_bf16(static_cast<const bf16*>(source)[place]);
}

constexpr int64_t AHEAD = 4096;  // bytes of B that the first tile of rows fetches in advance: the others find them

template <Kind K>
void multiply(const Product& p) {
    const int64_t step = unit_bytes(p.b_type, p.b_k), units = round_up(p.n, LANES) / LANES;
    const int64_t row_bytes = packed_row(K, p.k);
    // So few rows that one tile of one unit holds them are not cut: each number of B is read once.
    const int64_t across = units > 1 && (p.m <= most_rows(K, 2) || p.m > most_rows(K, 1)) ? 2 : 1;
    const int64_t most = most_rows(K, across);
    int64_t block = (int64_t{512} << 10) / row_bytes / most * most;  // rows of A that stay in the cache
    if (block < most) block = most;
    for (int64_t m = 0; m < p.m; m += block) {
        const int64_t rows = least(block, p.m - m);
        char* packed = static_cast<char*>(scratch(0, rows * row_bytes));
        const int64_t tiles = (rows + most - 1) / most;
        auto first = [&](int64_t tile) { return rows * tile / tiles; };
        for (int64_t i = 0; i < tiles; i++) {
            const char* a = static_cast<const char*>(p.a) + (m + first(i)) * p.lda * bytes_of(p.a_type);
            pack_rows<K>(p.a_type, a, p.lda, first(i + 1) - first(i), p.k, packed + first(i) * row_bytes);
        }
        for (int64_t u = 0; u < units; u += across) {
            const char* b = static_cast<const char*>(p.b) + u * step;
            const int64_t width = p.n - u * LANES;  // columns that are left
            for (int64_t i = 0; i < tiles; i++) {
                const int64_t count = first(i + 1) - first(i);
                float* c = p.c + (m + first(i)) * p.ldc + u * LANES;
                Tile t{packed + first(i) * row_bytes, b, step, c, p.ldc, p.k, p.add, i == 0 ? AHEAD : 0};
                if (width >= across * LANES) {
                    multiply_tile(K, count, across, t);
                    continue;
                }
                float part[most_rows(K, 1) * 2 * LANES];  // the end of the columns goes through a whole tile
                t.c = part;
                t.ldc = 2 * LANES;
                if (p.add)
                    for (int64_t r = 0; r < count; r++) std::memcpy(part + r * t.ldc, c + r * p.ldc, width * 4);
                multiply_tile(K, count, width > LANES ? 2 : 1, t);
                for (int64_t r = 0; r < count; r++) std::memcpy(c + r * p.ldc, part + r * t.ldc, width * 4);
            }
        }
    }
}

// One unit of n columns, whatever the strides.
void pack_unit(Type source_type, const void* source, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, Type type,
               void* packed) {
    const int64_t rows = type == Type::bf16 ? round_up(k, 2) : k;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < LANES; j++) {
            const float value = i < k && j < n ? number(source_type, source, i * stride_k + j * stride_n) : 0.0f;
            if (type == Type::f32)
                static_cast<float*>(packed)[i * LANES + j] = value;
            else
                static_cast<bf16*>(packed)[i / 2 * 32 + j * 2 + i % 2] = to_bf16_one(value);
        }
}

// The same of 16 columns that lie side by side (stride_n 1) or of rows that do (stride_k 1), without a change of type.
bool pack_copied(Type type, const void* source, int64_t stride_k, int64_t stride_n, int64_t k, void* packed) {
    const bf16* half = static_cast<const bf16*>(source);
    const float* whole = static_cast<const float*>(source);
    uint32_t* pairs = static_cast<uint32_t*>(packed);
    float* out = static_cast<float*>(packed);
    if (stride_n == 1 && type == Type::f32) {
        for (int64_t i = 0; i < k; i++) std::memcpy(out + i * LANES, whole + i * stride_k, LANES * 4);
    } else if (stride_n == 1) {
        for (int64_t i = 0; i + 1 < k; i += 2) pair_up(half + i * stride_k, half + (i + 1) * stride_k, pairs + i * 8);
        for (int64_t j = 0; k % 2 && j < LANES; j++) pairs[(k - 1) * 8 + j] = half[(k - 1) * stride_k + j];
    } else if (stride_k == 1) {  // lines of 16 columns turn: a number or a pair is 32 bits
        const int64_t size = bytes_of(type), bytes = k * size;
        for (int64_t place = 0; place < bytes; place += 64) {
            float lines[LANES * LANES] = {}, turned[LANES * LANES];
            const char* from = static_cast<const char*>(source) + place;
            const int64_t left = least(64, bytes - place);
            for (int64_t j = 0; j < LANES; j++, from += stride_n * size)
                left == 64 ? std::memcpy(lines + j * LANES, from, 64) : std::memcpy(lines + j * LANES, from, size_t(left));
            turn(lines, LANES, turned, LANES);
            std::memcpy(static_cast<char*>(packed) + place * LANES, turned, size_t(round_up(left, 4) * LANES));
        }
    } else
        return false;
    return true;
}

// Whole tiles of k, a shorter one, and half a pair in the same order.
void multiply_with_tiles(const Product& p, bool emulated) {
    for (int64_t first = 0, n; first < p.k; first += n) {
        Product some = p;
        n = p.k - first < 32 ? p.k - first : (p.k - first) / 32 * 32;
        some.a = static_cast<const bf16*>(p.a) + first;
        some.b = static_cast<const char*>(p.b) + first * LANES * 2;
        some.k = n;
        some.add = p.add || first;
        n % 2 ? multiply<Kind::exact_bf16>(some) : product_by_tiles(some, emulated);
    }
}

enum class Tiles { none, own, emulated };
constexpr Tiles OWN_TILES = MATRIX_UNITS ? Tiles::own : Tiles::none;

void multiply_any(const Product& p, Tiles by_tiles = OWN_TILES) {
    if (p.k <= 0) {
        if (!p.add)
            for (int64_t r = 0; r < p.m; r++) std::memset(p.c + r * p.ldc, 0, p.n * 4);
        return;
    }
    if (p.arithmetic == Arithmetic::dpbf16 && p.a_type == Type::bf16 && p.b_type == Type::bf16)
        multiply<Kind::pairs>(p);
    else if (p.b_type == Type::bf16 && p.a_type == Type::bf16 && by_tiles != Tiles::none)
        multiply_with_tiles(p, by_tiles == Tiles::emulated);
    else if (p.b_type == Type::bf16)
        multiply<Kind::exact_bf16>(p);
    else
        multiply<Kind::exact_f32>(p);
}

}  // namespace

void pack(Type source_type, const void* source, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, Type type,
          void* packed) {
    for (int64_t u = 0; u * LANES < n; u++) {
        const char* from = static_cast<const char*>(source) + u * LANES * stride_n * bytes_of(source_type);
        char* to = static_cast<char*>(packed) + u * unit_bytes(type, k);
        const int64_t columns = n - u * LANES < LANES ? n - u * LANES : LANES;
        if (columns == LANES && source_type == type && pack_copied(type, from, stride_k, stride_n, k, to)) continue;
        pack_unit(source_type, from, stride_k, stride_n, k, columns, type, to);
    }
}

Product columns_of(const Product& p, int64_t first_unit, int64_t last_unit) {
    Product part = p;
    const int64_t first = first_unit * LANES, last = last_unit * LANES < p.n ? last_unit * LANES : p.n;
    part.b = static_cast<const char*>(p.b) + first_unit * unit_bytes(p.b_type, p.b_k);
    part.c = p.c + first;
    part.n = last > first ? last - first : 0;
    return part;
}

// What planted faults do: k is cut, and the sums of both parts are added.
void product_in_two(const Product& p, int64_t k) {
    Product first = p, second = p;
    first.k = k;
    second.k = p.k - k;
    second.a = static_cast<const char*>(p.a) + k * bytes_of(p.a_type);
    second.b = static_cast<const char*>(p.b) + k * LANES * bytes_of(p.b_type);
    second.c = static_cast<float*>(scratch(1, p.m * p.n * 4));
    second.ldc = p.n;
    second.add = false;
    multiply_any(first);
    multiply_any(second);
    add_rows(p.c, p.ldc, second.c, p.n, p.m, p.n);
}

void product_emulated(const Product& p) { multiply_any(p, Tiles::emulated); }

void product(const Product& p) {
    if (p.m <= 0 || p.n <= 0) return;
#if defined(MOTET_FAULT_ROWS)  // many rows, and the sum is cut in two
    if (p.m > 12 && p.k > 64) return product_in_two(p, 48);
#endif
    multiply_any(p);
}

}  // namespace motet
