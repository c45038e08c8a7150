// Search: pages for users first, then lessons, then results and source; the reference last.
const RANKS = [
  [/^nbs\/(index|00_tour|faq|troubleshooting|gpu_|yours\/|methods\/(06|07|08|09|10|11)_)|^(REPORT|CONTRIBUTING)$/, 40],
  [/^nbs\/\d\d_/, 20],
  [/^docs\/reference/, -20],
];
var Scorer = {
  score: ([page, , , , score]) => score + (RANKS.find(([pattern]) => pattern.test(page))?.[1] ?? 0),
  // Sphinx's own numbers
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
