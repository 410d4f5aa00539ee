// Decompresses gzip data at once. The browser's own DecompressionStream is faster, but asynchronous: a page that is
// printed right after it is loaded, as by `chromium --print-to-pdf`, would be printed without charts.
"use strict";
const gunzip = (() => {
  // Base values and extra bits of the lengths (symbols 257 to 285) and of the distances, from RFC 1951, section 3.2.5.
  const LENGTHS = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
  const LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
  const DISTANCES = [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577];
  const DISTANCE_BITS = DISTANCES.map((_, index) => Math.max(0, (index >> 1) - 1));
  const CODE_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
  const HEADER_BYTES = 10; // page.py writes a header without optional fields

  // Returns the symbols of a Huffman code in canonical order, and the number of symbols of each length in bits.
  function huffmanCode(lengths) {
    const counts = new Uint16Array(16);
    lengths.forEach((length) => { counts[length] += 1; });
    counts[0] = 0;
    const next = new Uint16Array(17);
    for (let length = 1; length < 16; length += 1) next[length + 1] = next[length] + counts[length];
    const symbols = new Uint16Array(lengths.length);
    lengths.forEach((length, symbol) => { if (length) symbols[next[length]++] = symbol; });
    return { counts, symbols };
  }

  return (packed) => {
    const result = new Uint8Array(new DataView(packed.buffer).getUint32(packed.length - 4, true));
    let [position, written, buffer, buffered] = [HEADER_BYTES, 0, 0, 0];

    function bits(number) {
      for (; buffered < number; buffered += 8) buffer |= packed[position++] << buffered;
      const value = buffer & ((1 << number) - 1);
      buffer >>>= number;
      buffered -= number;
      return value;
    }

    function symbol({ counts, symbols }) {
      let [code, first, index] = [0, 0, 0];
      for (let length = 1; length < 16; length += 1) {
        code |= bits(1);
        if (code - first < counts[length]) return symbols[index + code - first];
        index += counts[length];
        first = (first + counts[length]) << 1;
        code <<= 1;
      }
      throw new Error("invalid gzip data");
    }

    function stored() {
      [buffer, buffered] = [0, 0];
      const length = packed[position] | (packed[position + 1] << 8);
      result.set(packed.subarray(position + 4, position + 4 + length), written);
      position += 4 + length;
      written += length;
    }

    function dynamicCodes() {
      const [literals, distances, codes] = [bits(5) + 257, bits(5) + 1, bits(4) + 4];
      const codeLengths = new Array(19).fill(0);
      for (let index = 0; index < codes; index += 1) codeLengths[CODE_ORDER[index]] = bits(3);
      const code = huffmanCode(codeLengths);
      const lengths = [];
      while (lengths.length < literals + distances) {
        const value = symbol(code);
        if (value < 16) lengths.push(value);
        else if (value === 16) lengths.push(...new Array(3 + bits(2)).fill(lengths.at(-1)));
        else lengths.push(...new Array(value === 17 ? 3 + bits(3) : 11 + bits(7)).fill(0));
      }
      return [huffmanCode(lengths.slice(0, literals)), huffmanCode(lengths.slice(literals))];
    }

    function fixedCodes() {
      const lengths = Array.from({ length: 288 }, (_, value) => value < 144 ? 8 : value < 256 ? 9 : value < 280 ? 7 : 8);
      return [huffmanCode(lengths), huffmanCode(new Array(30).fill(5))];
    }

    function compressed([literalCode, distanceCode]) {
      for (;;) {
        const value = symbol(literalCode);
        if (value === 256) return;
        if (value < 256) {
          result[written++] = value;
          continue;
        }
        const length = LENGTHS[value - 257] + bits(LENGTH_BITS[value - 257]);
        const distanceSymbol = symbol(distanceCode);
        const distance = DISTANCES[distanceSymbol] + bits(DISTANCE_BITS[distanceSymbol]);
        for (let end = written + length; written < end; written += 1) result[written] = result[written - distance];
      }
    }

    let last = 0;
    while (!last) {
      last = bits(1);
      const kind = bits(2);
      if (kind === 0) stored();
      else compressed(kind === 1 ? fixedCodes() : dynamicCodes());
    }
    return result;
  };
})();
